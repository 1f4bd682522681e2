"""Paged attention on the CPU: gather a sequence's K and V by slot, then torch's fused attention.

Decode sequences of similar length share one call; prefill chunks run one by one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from common.errors import ConfigError
from engine.attention.base import AttentionMetadata

MAX_PADDING = 1.5  # a sequence joins a decode group only while the longest is at most this many times its length


class CpuAttention:
    name = "cpu"

    def __init__(self, device: torch.device) -> None:
        if device.type != "cpu":
            raise ConfigError(f"attention backend 'cpu' does not run on {device}; use auto or flash")
        self._plan: _StepPlan | None = None

    def __call__(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: AttentionMetadata, scale: float
    ) -> Tensor:
        plan = self._step_plan(metadata, key_cache.shape[1], query.dtype)
        key_slots, value_slots = key_cache.flatten(0, 1), value_cache.flatten(0, 1)  # [slots, kv heads, head_dim]
        out = torch.empty_like(query)
        for decode in plan.decode_groups:
            attended = _attend_decode(query.index_select(0, decode.rows), key_slots, value_slots, decode, scale)
            out.index_copy_(0, decode.rows, attended)
        for prefill in plan.prefills:
            rows = slice(prefill.start, prefill.end)
            out[rows] = _attend_prefill(query[rows], key_slots, value_slots, prefill, scale)
        return out

    def _step_plan(self, metadata: AttentionMetadata, block_size: int, dtype: torch.dtype) -> _StepPlan:
        """What depends on the step but not on the layer: worked out at the step's first layer, used by the rest."""
        if self._plan is None or not self._plan.is_for(metadata, block_size, dtype):
            self._plan = _plan_step(metadata, block_size, dtype)
        return self._plan


@dataclass(frozen=True)
class _DecodeGroup:
    """Sequences that add one token each, padded to the longest of them."""

    rows: Tensor  # [n] int64, their query rows
    slots: Tensor  # [n * max_len] int64
    mask: Tensor | None  # [n, 1, 1, max_len], 0 or -inf; None when all are equally long


@dataclass(frozen=True)
class _Prefill:
    start: int  # its query rows [start, end)
    end: int
    slots: Tensor  # [seq_len] int64
    mask: Tensor | None  # [query_len, seq_len], 0 or -inf; None when the chunk is the whole sequence


@dataclass(frozen=True)
class _StepPlan:
    metadata: AttentionMetadata
    block_size: int
    dtype: torch.dtype
    decode_groups: list[_DecodeGroup]
    prefills: list[_Prefill]

    def is_for(self, metadata: AttentionMetadata, block_size: int, dtype: torch.dtype) -> bool:
        return self.metadata is metadata and self.block_size == block_size and self.dtype == dtype


def _attend_decode(query: Tensor, keys: Tensor, values: Tensor, group: _DecodeGroup, scale: float) -> Tensor:
    n, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    # The query heads that share a kv head stand in for query positions, so no K or V is repeated.
    q = query.view(n, num_kv_heads, num_heads // num_kv_heads, head_dim)
    k = keys.index_select(0, group.slots).view(n, -1, num_kv_heads, head_dim).transpose(1, 2)
    v = values.index_select(0, group.slots).view(n, -1, num_kv_heads, head_dim).transpose(1, 2)
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask, scale=scale)
    return attended.reshape(n, num_heads, head_dim)


def _attend_prefill(query: Tensor, keys: Tensor, values: Tensor, prefill: _Prefill, scale: float) -> Tensor:
    query_len, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    shared = (num_kv_heads, num_heads // num_kv_heads, -1, head_dim)
    # kv heads as the batch, the heads that share one as its heads: K and V repeat by stride, not by copy.
    q = query.view(query_len, *shared[:2], head_dim).permute(1, 2, 0, 3)
    k = keys.index_select(0, prefill.slots).transpose(0, 1).unsqueeze(1).expand(shared)
    v = values.index_select(0, prefill.slots).transpose(0, 1).unsqueeze(1).expand(shared)
    attended = F.scaled_dot_product_attention(
        q, k, v, attn_mask=prefill.mask, is_causal=prefill.mask is None, scale=scale
    )
    return attended.permute(2, 0, 1, 3).reshape(query_len, num_heads, head_dim)


def _plan_step(metadata: AttentionMetadata, block_size: int, dtype: torch.dtype) -> _StepPlan:
    groups = _group_by_length(metadata.seq_lens_list[: metadata.num_decodes])
    decode_groups = [_decode_group(metadata, rows, block_size, dtype) for rows in groups]
    prefills = []
    start = metadata.num_decodes
    for i in range(metadata.num_decodes, len(metadata.query_lens_list)):
        prefills.append(_prefill(metadata, i, start, block_size, dtype))
        start = prefills[-1].end
    return _StepPlan(metadata, block_size, dtype, decode_groups, prefills)


def _group_by_length(lengths: list[int]) -> list[list[int]]:
    """Indices, shortest first, cut so that one long sequence does not make all others pay for its padding."""
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if groups and lengths[i] <= MAX_PADDING * lengths[groups[-1][0]]:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _decode_group(metadata: AttentionMetadata, indices: list[int], block_size: int, dtype: torch.dtype) -> _DecodeGroup:
    rows = torch.tensor(indices)
    seq_lens = metadata.seq_lens[rows].long()
    positions = torch.arange(int(seq_lens[-1]))
    is_padding = positions >= seq_lens[:, None]  # [n, max_len]
    # Padding reads the sequence's own last token: unwritten slots may hold NaN, which no mask takes back.
    padded = torch.minimum(positions, seq_lens[:, None] - 1)
    slots = _slots(metadata.block_table[rows], padded, block_size)
    mask = _additive(is_padding, dtype)[:, None, None, :] if is_padding.any() else None
    return _DecodeGroup(rows, slots.flatten(), mask)


def _prefill(metadata: AttentionMetadata, i: int, start: int, block_size: int, dtype: torch.dtype) -> _Prefill:
    query_len, seq_len = metadata.query_lens_list[i], metadata.seq_lens_list[i]
    positions = torch.arange(seq_len)
    slots = _slots(metadata.block_table[i : i + 1], positions[None], block_size)[0]
    mask = None
    if query_len < seq_len:
        mask = _additive(positions > positions[seq_len - query_len :, None], dtype)
    return _Prefill(start, start + query_len, slots, mask)


def _slots(block_tables: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """Slot of each position: block tables [n, blocks], positions [n, length] -> [n, length]."""
    blocks = block_tables.long().gather(1, positions // block_size)
    return blocks * block_size + positions % block_size


def _additive(is_hidden: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(is_hidden.shape, dtype=dtype).masked_fill_(is_hidden, float("-inf"))
