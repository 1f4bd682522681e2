"""The oracle: attention written out, one sequence at a time, in float32. Slow and plain on purpose."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.base import AttentionMetadata


class TorchReferenceAttention:
    name = "torch_reference"

    def __call__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        out = torch.empty_like(query)
        start = 0
        for i, (query_len, seq_len) in enumerate(zip(metadata.query_lens_list, metadata.seq_lens_list, strict=True)):
            rows = slice(start, start + query_len)
            keys = gather_sequence(key_cache, metadata.block_table[i], seq_len)
            values = gather_sequence(value_cache, metadata.block_table[i], seq_len)
            out[rows] = attend(query[rows], keys, values, scale, window)
            start += query_len
        return out


def gather_sequence(cache: Tensor, block_table: Tensor, seq_len: int) -> Tensor:
    """One sequence's K or V out of the paged cache: [seq_len, num_kv_heads, head_dim]."""
    num_blocks = -(-seq_len // cache.shape[1])
    return cache[block_table[:num_blocks].long()].flatten(0, 1)[:seq_len]


def attend(query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None = None) -> Tensor:
    """The query rows are the last ones of the sequence; each sees itself and what is before it, as far as the window.

    query [query_len, num_heads, head_dim]; keys, values [seq_len, num_kv_heads, head_dim].
    """
    query_len, seq_len = query.shape[0], keys.shape[0]
    group = query.shape[1] // keys.shape[1]  # query heads per kv head
    q = query.float().transpose(0, 1)  # [heads, query_len, head_dim]
    k = keys.float().repeat_interleave(group, dim=1).transpose(0, 1)  # [heads, seq_len, head_dim]
    v = values.float().repeat_interleave(group, dim=1).transpose(0, 1)

    positions = torch.arange(seq_len, device=query.device)
    distance = positions[seq_len - query_len :, None] - positions[None, :]  # [query_len, seq_len]
    is_visible = (distance >= 0) & (distance < (window or seq_len))
    scores = (q @ k.transpose(1, 2) * scale).masked_fill(~is_visible, float("-inf"))
    return (scores.softmax(dim=-1) @ v).transpose(0, 1).to(query.dtype)
