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
        self._metadata: AttentionMetadata | None = None
        self._plans: dict[_View, _StepPlan] = {}  # of the step that _metadata describes

    def __call__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        plan = self._step_plan(metadata, _View(key_cache.shape[1], query.dtype, window))
        key_slots, value_slots = key_cache.flatten(0, 1), value_cache.flatten(0, 1)  # [slots, kv heads, head_dim]
        out = torch.empty_like(query)
        for decode in plan.decode_groups:
            attended = _attend_decode(query.index_select(0, decode.rows), key_slots, value_slots, decode, scale)
            out.index_copy_(0, decode.rows, attended)
        for prefill in plan.prefills:
            rows = slice(prefill.start, prefill.end)
            out[rows] = _attend_prefill(query[rows], key_slots, value_slots, prefill, scale)
        return out

    def _step_plan(self, metadata: AttentionMetadata, view: _View) -> _StepPlan:
        """What layers of one step share: worked out by the first that looks at the cache this way."""
        if self._metadata is not metadata:
            self._metadata, self._plans = metadata, {}
        if view not in self._plans:
            self._plans[view] = _plan_step(metadata, view)
        return self._plans[view]


@dataclass(frozen=True)
class _View:
    """How a layer looks at the cache; most models have one, those with a window in some layers only have two."""

    block_size: int
    dtype: torch.dtype
    window: int | None

    def first_visible(self, position: int) -> int:
        """The earliest position that a query at `position` sees."""
        return 0 if self.window is None else max(0, position + 1 - self.window)


@dataclass(frozen=True)
class _DecodeGroup:
    """Sequences that add one token each, padded to the one that sees most."""

    rows: Tensor  # [n] int64, their query rows
    slots: Tensor  # [n * max_len] int64
    mask: Tensor | None  # [n, 1, 1, max_len], 0 or -inf; None when all see equally much


@dataclass(frozen=True)
class _Prefill:
    start: int  # its query rows [start, end)
    end: int
    slots: Tensor  # [visible] int64, from the first token that any of the rows sees to the last
    mask: Tensor | None  # [query_len, visible], 0 or -inf; None when the chunk is the whole sequence and sees it all


@dataclass(frozen=True)
class _StepPlan:
    decode_groups: list[_DecodeGroup]
    prefills: list[_Prefill]


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


def _plan_step(metadata: AttentionMetadata, view: _View) -> _StepPlan:
    decode_lens = metadata.seq_lens_list[: metadata.num_decodes]
    groups = _group_by_length([length - view.first_visible(length - 1) for length in decode_lens])
    decode_groups = [_decode_group(metadata, rows, view) for rows in groups]
    prefills = []
    start = metadata.num_decodes
    for i in range(metadata.num_decodes, len(metadata.query_lens_list)):
        prefills.append(_prefill(metadata, i, start, view))
        start = prefills[-1].end
    return _StepPlan(decode_groups, prefills)


def _group_by_length(lengths: list[int]) -> list[list[int]]:
    """Indices, shortest first, cut so that one long sequence does not make all others pay for its padding."""
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if groups and lengths[i] <= MAX_PADDING * lengths[groups[-1][0]]:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _decode_group(metadata: AttentionMetadata, indices: list[int], view: _View) -> _DecodeGroup:
    rows = torch.tensor(indices)
    last = [metadata.seq_lens_list[i] - 1 for i in indices]
    first = [view.first_visible(position) for position in last]
    num_visible = last[-1] + 1 - first[-1]  # the group's longest comes last
    positions = torch.tensor(first)[:, None] + torch.arange(num_visible)  # [n, max_len]
    last_positions = torch.tensor(last)[:, None]
    is_padding = positions > last_positions
    # Padding reads the sequence's own last token: unwritten slots may hold NaN, which no mask takes back.
    slots = _slots(metadata.block_table[rows], torch.minimum(positions, last_positions), view.block_size)
    mask = _additive(is_padding, view.dtype)[:, None, None, :] if is_padding.any() else None
    return _DecodeGroup(rows, slots.flatten(), mask)


def _prefill(metadata: AttentionMetadata, i: int, start: int, view: _View) -> _Prefill:
    query_len, seq_len = metadata.query_lens_list[i], metadata.seq_lens_list[i]
    first = view.first_visible(seq_len - query_len)
    positions = torch.arange(first, seq_len)
    slots = _slots(metadata.block_table[i : i + 1], positions[None], view.block_size)[0]
    mask = None
    if query_len < seq_len or view.first_visible(seq_len - 1) > 0:
        distance = torch.arange(seq_len - query_len, seq_len)[:, None] - positions  # [query_len, visible]
        mask = _additive((distance < 0) | (distance >= (view.window or seq_len)), view.dtype)
    return _Prefill(start, start + query_len, slots, mask)


def _slots(block_tables: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """Slot of each position: block tables [n, blocks], positions [n, length] -> [n, length]."""
    blocks = block_tables.long().gather(1, positions // block_size)
    return blocks * block_size + positions % block_size


def _additive(is_hidden: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(is_hidden.shape, dtype=dtype).masked_fill_(is_hidden, float("-inf"))
