"""Every attention backend that this machine has, on ragged batches, against the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate

import torch
from torch import Tensor

from common.errors import ConfigError
from engine.attention import flash
from engine.attention.base import AttentionMetadata
from engine.attention.select import select_attention
from engine.attention.torch_reference import TorchReferenceAttention
from gpucheck.figures import Figure, at_most, failed, skipped

SCALE = 0.1
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}

Attend = Callable[[Tensor, Tensor, Tensor, AttentionMetadata, float], Tensor]


@dataclass(frozen=True)
class Shape:
    """Sequences as (query_len, seq_len), decodes first."""

    sequences: tuple[tuple[int, int], ...]
    block_size: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128


SHAPES = {
    "decode": Shape(((1, 1), (1, 255), (1, 256), (1, 257), (1, 4000)), 256),
    "one_long_decode": Shape(((1, 8000),), 256),
    "prefill": Shape(((300, 300), (2, 2), (64, 1000), (257, 513)), 256),
    "mixed": Shape(((1, 77), (1, 3000), (129, 129), (16, 2000)), 256),
    "narrow": Shape(((1, 900), (50, 70)), 256, num_heads=14, num_kv_heads=2, head_dim=64),
}
SMALL_BLOCKS = {"blocks_of_16": Shape(((1, 77), (1, 3000), (129, 129), (16, 2000)), 16)}  # not for flash-attn


def check_attention(device: torch.device, shapes: dict[str, Shape], more_shapes: dict[str, Shape]) -> Iterator[Figure]:
    """`shapes` for every backend, `more_shapes` for those that take any block size."""
    for dtype in (torch.bfloat16, torch.float16):
        yield from _check("flash_attn", _flash_attn(), dtype, device, shapes)
        yield from _check("torch_varlen", _torch_varlen(device), dtype, device, shapes)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        yield from _check("triton", _triton(device, dtype), dtype, device, shapes | more_shapes)


def _flash_attn() -> Attend | str:
    return flash.flash_varlen if flash.has_flash_attn() else "flash-attn is not installed"


def _torch_varlen(device: torch.device) -> Attend | str:
    if device.type != "cuda":
        return "runs on CUDA only"
    if not flash.torch_reads_block_tables():
        return f"torch {torch.__version__} reads no block tables"
    return flash.torch_varlen


def _triton(device: torch.device, dtype: torch.dtype) -> Attend | str:
    if find_spec("triton") is None:
        return "triton is not installed"
    try:
        return select_attention("triton", device, dtype)
    except ConfigError as error:
        return str(error)


def _check(
    name: str, attend: Attend | str, dtype: torch.dtype, device: torch.device, shapes: dict[str, Shape]
) -> Iterator[Figure]:
    label = f"attention_{name}_{str(dtype).removeprefix('torch.')}"
    if isinstance(attend, str):
        yield skipped(label, attend)
        return
    for shape_name, shape in shapes.items():
        figure_name = f"{label}_{shape_name}"
        try:
            error = largest_error(attend, shape, dtype, device)
        except Exception as problem:  # the next backend may be fine, and whoever runs this has the GPU only once
            yield failed(figure_name, f"{type(problem).__name__}: {problem}")
        else:
            yield at_most(figure_name, error, "largest error", TOLERANCE[dtype])


def largest_error(attend: Attend, shape: Shape, dtype: torch.dtype, device: torch.device) -> float:
    metadata, num_blocks = _metadata(shape, device)
    generator = torch.Generator().manual_seed(0)
    num_tokens = sum(query_len for query_len, _ in shape.sequences)

    def noise(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device, dtype)

    query = noise(num_tokens, shape.num_heads, shape.head_dim)
    cache_shape = (num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
    keys, values = noise(*cache_shape), noise(*cache_shape)
    expected = TorchReferenceAttention()(query.float(), keys.float(), values.float(), metadata, SCALE)
    actual = attend(query, keys, values, metadata, SCALE)
    return float((actual.float() - expected).abs().max())


def _metadata(shape: Shape, device: torch.device) -> tuple[AttentionMetadata, int]:
    """Every sequence in shuffled blocks, and how many blocks there are."""
    query_lens = [query_len for query_len, _ in shape.sequences]
    seq_lens = [seq_len for _, seq_len in shape.sequences]
    counts = [-(-seq_len // shape.block_size) for seq_len in seq_lens]
    shuffled = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)).tolist()
    tables = [[shuffled.pop() for _ in range(count)] + [0] * (max(counts) - count) for count in counts]
    num_decodes = next((i for i, query_len in enumerate(query_lens) if query_len != 1), len(query_lens))
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32, device=device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        block_table=torch.tensor(tables, dtype=torch.int32, device=device),
        query_lens_list=query_lens,
        seq_lens_list=seq_lens,
        num_decodes=num_decodes,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
    )
    return metadata, sum(counts)
