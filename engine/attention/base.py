"""The one attention call that every backend answers, and what it needs to know of a step's batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionMetadata:
    """How one step's tokens lie in the batch and in the paged cache. Built once per step, shared by all layers.

    Sequence i owns query rows query_start_loc[i] .. query_start_loc[i + 1]; they are the *last* query_lens[i] of its
    seq_lens[i] tokens, whose K and V are already in the cache (this step's own included). Decode sequences (query
    length 1) come first in the batch: sequences [0, num_decodes).
    """

    query_start_loc: Tensor  # [num_seqs + 1] int32
    seq_lens: Tensor  # [num_seqs] int32, tokens in the cache after this step
    block_table: Tensor  # [num_seqs, max blocks] int32, padded with 0
    query_lens_list: list[int]  # the same on the host: no device sync to read them
    seq_lens_list: list[int]
    num_decodes: int
    max_query_len: int
    max_seq_len: int


class AttentionBackend(Protocol):
    """Causal attention of a step's queries over the paged cache of one layer.

    window: how many tokens a query sees, itself included; None: all up to itself. A window only masks: the KV cache
    goes on holding every token, so blocks, prefix cache and KV transfer need not know of it.
    A backend may be given several steps' metadata in turn; it keeps no state that outlives a step.
    """

    name: str

    def __call__(
        self,
        query: Tensor,  # [num_tokens, num_heads, head_dim]
        key_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
        value_cache: Tensor,  # like key_cache
        metadata: AttentionMetadata,
        scale: float,
        window: int | None = None,
    ) -> Tensor:  # [num_tokens, num_heads, head_dim]
        ...


def default_block_size(device: torch.device) -> int:
    """flash-attn 2 needs a multiple of 256; a CPU wastes less memory with small blocks."""
    return 256 if device.type == "cuda" else 16
