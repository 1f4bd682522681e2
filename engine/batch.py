"""One step's work as tensors: which tokens run, where their K and V go, and whose logits are wanted."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from engine.attention.base import AttentionMetadata
from engine.block_manager import slot_mapping
from engine.sequence import ScheduledSequence
from engine.upload import upload


@dataclass(frozen=True)
class Batch:
    """A varlen batch: decode tokens and prefill chunks side by side, sharing every linear layer."""

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64, position of each token in its own sequence
    slot_mapping: Tensor  # [num_tokens] int64, where each token's K and V go
    logits_indices: Tensor  # [num_sampled] int64, the rows whose logits are needed
    attention: AttentionMetadata


def build_batch(scheduled: Seq[ScheduledSequence], block_size: int, device: torch.device) -> Batch:
    """Lay a step's work out as tensors. `scheduled` has its single-token parts first, as the scheduler gives it."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logits_indices: list[int] = []
    for part in scheduled:
        token_ids += part.sequence.token_ids[part.start : part.end]
        positions += range(part.start, part.end)
        slots += slot_mapping(part.sequence.block_table, part.start, part.end, block_size)
        if part.is_sampled:
            logits_indices.append(len(token_ids) - 1)
    return Batch(
        token_ids=upload(token_ids, torch.int64, device),
        positions=upload(positions, torch.int64, device),
        slot_mapping=upload(slots, torch.int64, device),
        logits_indices=upload(logits_indices, torch.int64, device),
        attention=_attention_metadata(scheduled, device),
    )


def _attention_metadata(scheduled: Seq[ScheduledSequence], device: torch.device) -> AttentionMetadata:
    query_lens = [part.num_scheduled_tokens for part in scheduled]
    seq_lens = [part.end for part in scheduled]
    width = max(len(part.sequence.block_table) for part in scheduled)
    tables = [part.sequence.block_table + [0] * (width - len(part.sequence.block_table)) for part in scheduled]
    return AttentionMetadata(
        query_start_loc=upload([0, *accumulate(query_lens)], torch.int32, device),
        seq_lens=upload(seq_lens, torch.int32, device),
        block_table=upload(tables, torch.int32, device),
        query_lens_list=query_lens,
        seq_lens_list=seq_lens,
        num_decodes=query_lens.count(1),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
    )
