"""Paged attention on CUDA: flash-attn where it is installed, else the same kernels inside torch."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from common.errors import ConfigError
from engine.attention.base import AttentionMetadata

try:
    from flash_attn import flash_attn_varlen_func
except ImportError:  # the optional extra "cuda"
    flash_attn_varlen_func = None

BLOCK_SIZE_MULTIPLE = 256
OLDEST_CAPABILITY = (8, 0)


def runs_on(device: torch.device) -> bool:
    """Whether one of the two libraries is here in a version that reads block tables, and the GPU is new enough."""
    if not (has_flash_attn() or torch_reads_block_tables()):
        return False
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= OLDEST_CAPABILITY


def has_flash_attn() -> bool:
    return flash_attn_varlen_func is not None


def torch_reads_block_tables() -> bool:
    """torch's variable-length attention is there since 2.10, its block tables came later."""
    return "block_table" in inspect.signature(varlen_attn).parameters


class FlashAttention:
    name = "flash"

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ConfigError(f"attention backend 'flash' needs a CUDA device, not {device}; use auto or cpu")
        if not (has_flash_attn() or torch_reads_block_tables()):
            raise ConfigError("attention backend 'flash' needs flash-attn or a newer torch here; use auto or triton")

    def __call__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        _require_fit(query, key_cache)
        if has_flash_attn():
            return flash_varlen(query, key_cache, value_cache, metadata, scale, window)
        return torch_varlen(query, key_cache, value_cache, metadata, scale, window)


def flash_varlen(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None = None,
) -> Tensor:
    # flash-attn takes key lengths as running sums even where a block table says where the keys are.
    key_start_loc = torch.nn.functional.pad(metadata.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
    out: Tensor = flash_attn_varlen_func(
        query,
        key_cache,
        value_cache,
        cu_seqlens_q=metadata.query_start_loc,
        cu_seqlens_k=key_start_loc,
        max_seqlen_q=metadata.max_query_len,
        max_seqlen_k=metadata.max_seq_len,
        softmax_scale=scale,
        causal=True,
        window_size=_window_size(window),
        block_table=metadata.block_table,
    )
    return out


def torch_varlen(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None = None,
) -> Tensor:
    out = varlen_attn(
        query,
        key_cache,
        value_cache,
        metadata.query_start_loc,
        None,
        metadata.max_query_len,
        metadata.max_seq_len,
        scale=scale,
        window_size=_window_size(window),
        enable_gqa=True,
        seqused_k=metadata.seq_lens,
        block_table=metadata.block_table,
    )
    assert isinstance(out, Tensor)
    return out


def _window_size(window: int | None) -> tuple[int, int]:
    """Keys visible to the left and right of a query, itself not counted; -1: all. Aligned to the last key."""
    return (-1 if window is None else window - 1, 0)


def _require_fit(query: Tensor, key_cache: Tensor) -> None:
    if query.dtype not in (torch.bfloat16, torch.float16):
        raise ConfigError(f"attention backend 'flash' computes in bfloat16 or float16, not {query.dtype}")
    if key_cache.shape[1] % BLOCK_SIZE_MULTIPLE:
        raise ConfigError(
            f"attention backend 'flash' needs a block_size that is a multiple of {BLOCK_SIZE_MULTIPLE}, "
            f"not {key_cache.shape[1]}"
        )
