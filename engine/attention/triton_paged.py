"""Paged attention in Triton, of our own: for GPUs without flash-attn, and for what flash-attn does not take (float32,
small blocks).

K and V are read through the block table, once for all the query heads that share them. The softmax runs over the keys
as they come (Milakov and Gimelshein 2018). Decode shares the keys of one sequence among several programs and combines
their results (flash-decoding, Dao et al. 2023): a few sequences would leave most of the device idle.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.errors import ConfigError
from engine.attention.base import AttentionMetadata
from engine.attention.triton_kernels import attend_tile, combine_splits

MIN_KEYS_PER_SPLIT = 128
MAX_SPLITS = 32
SMALLEST_DOT = 16  # rows, columns and depth that tl.dot needs
IS_INTERPRETED = not isinstance(attend_tile, triton.JITFunction)  # on the CPU, in tests: Triton's own switch
INTERPRETED_PROCESSORS = 8


class TritonAttention:
    """Takes a sliding window: a token then sees itself and the window - 1 tokens before it."""

    name = "triton"

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda" and not IS_INTERPRETED:
            raise ConfigError(f"attention backend 'triton' needs a CUDA device, not {device}; use auto or cpu")
        self._num_processors = INTERPRETED_PROCESSORS
        if device.type == "cuda" and torch.cuda.is_available():
            self._num_processors = torch.cuda.get_device_properties(device).multi_processor_count

    def __call__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        assert query.stride(-1) == 1, "query heads are contiguous"
        assert key_cache.stride() == value_cache.stride(), "K and V lie alike"
        out = torch.empty_like(query)
        num_seqs = metadata.seq_lens.shape[0]
        launch = _Launch(query, key_cache, value_cache, metadata, scale * math.log2(math.e), window)
        # Triton launches on the thread's current device, wherever the tensors are.
        with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
            if metadata.num_decodes:
                num_programs = metadata.num_decodes * key_cache.shape[2]
                num_keys = metadata.max_seq_len if window is None else min(window, metadata.max_seq_len)
                launch.decode(out, num_splits(num_programs, num_keys, self._num_processors))
            if metadata.num_decodes < num_seqs:
                launch.prefill(out)
        return out


def num_splits(num_programs: int, num_keys: int, num_processors: int) -> int:
    """A power of two: enough to keep every processor busy, as long as each split has enough keys to be worth it."""
    wanted = 2 * num_processors // num_programs
    most = min(num_keys // MIN_KEYS_PER_SPLIT, wanted, MAX_SPLITS)
    return 1 if most < 2 else 1 << (most.bit_length() - 1)


@dataclass(frozen=True)
class _Launch:
    """One layer's call: what both phases give the kernel alike."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    metadata: AttentionMetadata
    scale_log2: float
    window: int | None

    @property
    def group(self) -> int:
        return self.query.shape[1] // self.key_cache.shape[2]

    @property
    def head_tile(self) -> int:
        return _power_of_two(self.query.shape[2])

    def decode(self, out: Tensor, splits: int) -> None:
        """The first num_decodes sequences, one token each, whose rows are the first of the batch."""
        num_decodes, (_, num_heads, head_dim) = self.metadata.num_decodes, self.query.shape
        num_rows = _power_of_two(self.group)
        if splits == 1:
            self._attend(out, out, 0, (1, num_decodes), num_rows, 1)
            return
        partial = torch.empty((num_decodes, num_heads, splits, head_dim), dtype=torch.float32, device=out.device)
        log_sums = torch.empty((num_decodes, num_heads, splits), dtype=torch.float32, device=out.device)
        self._attend(partial, log_sums, 0, (1, num_decodes), num_rows, splits)
        combine_splits[(num_decodes, num_heads)](
            partial, log_sums, out, out.stride(0), out.stride(1), head_dim, self.head_tile, splits, num_warps=4
        )

    def prefill(self, out: Tensor) -> None:
        """All other sequences. Programs beyond the end of a shorter chunk return at once."""
        first, num_seqs = self.metadata.num_decodes, self.metadata.seq_lens.shape[0]
        num_rows = max(64 if self.query.element_size() == 2 else 32, _power_of_two(self.group))
        num_tiles = triton.cdiv(self.metadata.max_query_len, num_rows // self.group)
        self._attend(out, out, first, (num_tiles, num_seqs - first), num_rows, 1)

    def _attend(
        self, out: Tensor, log_sums: Tensor, first_sequence: int, tiles: tuple[int, int], num_rows: int, splits: int
    ) -> None:
        metadata, head_dim = self.metadata, self.query.shape[2]
        _, block_size, num_kv_heads, _ = self.key_cache.shape
        attend_tile[(*tiles, num_kv_heads * splits)](
            self.query,
            self.key_cache,
            self.value_cache,
            out,
            log_sums,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_table,
            self.scale_log2,
            first_sequence,
            self.window or 0,
            metadata.block_table.stride(0),
            *self.query.stride()[:2],
            *self.key_cache.stride()[:3],
            *out.stride()[:2],
            out.stride(2) if splits > 1 else 0,
            GROUP=self.group,
            HEAD_DIM=head_dim,
            HEAD_TILE=self.head_tile,
            BLOCK_SIZE=block_size,
            ROWS=num_rows,
            KEYS=_keys_at_a_time(self.head_tile * self.query.element_size()),
            NUM_SPLITS=splits,
            HAS_WINDOW=self.window is not None,
            DOT_DTYPE=_dot_dtype(self.query.dtype),
            PRECISION="ieee",  # of float32 products; TF32 would miss the reference
            num_warps=4,
            num_stages=2,
        )


def _power_of_two(size: int) -> int:
    """The next one that tl.dot takes."""
    return max(SMALLEST_DOT, 1 << (size - 1).bit_length())


def _keys_at_a_time(row_bytes: int) -> int:
    """Two stages of K and V, and the query tile beside them, stay below the 99 KB that the smallest GPUs offer."""
    return max(SMALLEST_DOT, min(64, 16384 // row_bytes))


def _dot_dtype(dtype: torch.dtype) -> tl.dtype:
    if IS_INTERPRETED:
        return tl.float32  # the interpreter multiplies bfloat16 by its bits; the products are exact in float32
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]
