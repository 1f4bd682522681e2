"""One step's work as tensors: which tokens run, where their K and V go, and whose logits are wanted."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.attention.base import AttentionMetadata


@dataclass(frozen=True)
class Batch:
    """A varlen batch: decode tokens and prefill chunks side by side, sharing every linear layer."""

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64, position of each token in its own sequence
    slot_mapping: Tensor  # [num_tokens] int64, where each token's K and V go
    logits_indices: Tensor  # [num_sampled] int64, the rows whose logits are needed
    attention: AttentionMetadata
