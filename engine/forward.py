"""The one call through which a step computes: a batch in, the wanted rows' logits out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.attention.base import AttentionBackend
from engine.batch import Batch
from engine.kv_cache import KVCache
from engine.model.decoder import Decoder


class Forward(Protocol):
    def __call__(self, batch: Batch, on_layer_computed: Callable[[int], None] | None) -> Tensor:
        """Logits of the rows batch.logits_indices, [num_sampled, vocab_size] float32, valid until the next call.

        on_layer_computed(i) is called once the work that puts layer i's K and V of this step into the cache is done,
        or queued on the device ahead of whatever the caller queues next.
        """


@dataclass(frozen=True)
class EagerForward:
    """The model's own forward pass, operation by operation."""

    model: Decoder
    kv_cache: KVCache
    attention: AttentionBackend

    def __call__(self, batch: Batch, on_layer_computed: Callable[[int], None] | None) -> Tensor:
        logits: Tensor = self.model(batch, self.kv_cache, self.attention, on_layer_computed)
        return logits
