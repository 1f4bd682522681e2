"""The same work for our kernels and for torch, in the shapes of SmolLM2-135M.

Each goes over as many layers as the model has, with weights and KV of their own: like a step, it finds nothing in the
caches that the layer before did not leave there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.attention.base import AttentionMetadata
from engine.attention.cpu import CpuAttention
from engine.model.layers import RMSNorm, Rotation
from engine.native.kernels import NativeKernels

LAYERS, HIDDEN, INTERMEDIATE, VOCABULARY = 30, 576, 1536, 49152
HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
BLOCK_SIZE = 16
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM
CPU = torch.device("cpu")

DECODE_BATCHES = (1, 4, 8, 16, 32, 64)
PREFILL_LENGTHS = (128, 512, 2048)


@dataclass(frozen=True)
class Workload:
    name: str
    native: Callable[[], object]
    in_torch: Callable[[], object]
    num_bytes: float  # that must be read from memory
    num_operations: float  # that must be done in the matrix units
    goal: float | None = None  # the share of the limit that is asked for


def linear_workloads(kernels: NativeKernels) -> Iterator[Workload]:
    """All linear layers of a step: with logits for every row up to 64 rows (decode), for one beyond (prefill)."""
    shapes = ((QKV, HIDDEN), (HIDDEN, HIDDEN), (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
    weights = [[_random(*shape) for shape in shapes] for _ in range(LAYERS)]
    lm_head = _random(VOCABULARY, HIDDEN)
    packed = [
        (kernels.pack_linear(qkv), kernels.pack_linear(o), kernels.pack_swiglu(gate_up), kernels.pack_linear(down))
        for qkv, o, gate_up, down in weights
    ]
    packed_head = kernels.pack_linear(lm_head)
    in_layers = LAYERS * sum(rows * columns for rows, columns in shapes)
    for m in (*DECODE_BATCHES, *PREFILL_LENGTHS):
        num_logits = m if m in DECODE_BATCHES else 1
        x, attended = _random(m, HIDDEN), _random(m, HEADS * HEAD_DIM)

        def native(x: Tensor = x, attended: Tensor = attended, num_logits: int = num_logits) -> None:
            for qkv, o, gate_up, down in packed:
                kernels.linear(x, qkv)
                kernels.linear(attended, o, residual=x)
                kernels.linear(kernels.swiglu(x, gate_up), down, residual=x)
            kernels.linear_float32(x[:num_logits], packed_head)

        def in_torch(x: Tensor = x, attended: Tensor = attended, num_logits: int = num_logits) -> None:
            for qkv, o, gate_up, down in weights:
                F.linear(x, qkv)
                x + F.linear(attended, o)
                gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
                x + F.linear(F.silu(gate) * up, down)
            F.linear(x[:num_logits], lm_head).float()

        num_bytes = 2.0 * (in_layers + VOCABULARY * HIDDEN)
        num_operations = 2.0 * (in_layers * m + VOCABULARY * HIDDEN * num_logits)
        goal = 0.7 if m <= 8 else 0.8 if m >= 512 else None
        yield Workload(f"linear.{m}_rows", native, in_torch, num_bytes, num_operations, goal)


def attention_workloads(kernels: NativeKernels) -> Iterator[Workload]:
    """Blocks in the order in which a fresh pool gives them out, and shuffled, as after many requests."""
    for name, sequences in (
        ("decode_1x1024", [(1, 1024)]),
        ("decode_8x1024", [(1, 1024)] * 8),
        ("decode_32x64", [(1, 64)] * 32),
        ("decode_2x8192", [(1, 8192)] * 2),
        ("prefill_512", [(512, 512)]),
        ("prefill_2048", [(2048, 2048)]),
        ("prefill_512_of_2048", [(512, 2048)]),
    ):
        for order in ("in_order", "shuffled"):
            if order == "shuffled" and not name.startswith("decode"):
                continue
            yield _attention_workload(kernels, f"attention.{name}.{order}", sequences, order == "shuffled")


def _attention_workload(
    kernels: NativeKernels, name: str, sequences: list[tuple[int, int]], is_shuffled: bool
) -> Workload:
    metadata = _metadata(sequences, is_shuffled)
    cache = _random(LAYERS, 2, int(metadata.block_table.max()) + 1, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    query = _random(sum(metadata.query_lens_list), HEADS, HEAD_DIM)
    torch_attention = CpuAttention(CPU)
    num_seen = sum(n * (length - n) + n * (n + 1) / 2 for n, length in sequences)
    return Workload(
        name,
        lambda: [kernels.attention(query, keys, values, metadata, 0.125) for keys, values in cache],
        lambda: [torch_attention(query, keys, values, metadata, 0.125) for keys, values in cache],
        num_bytes=LAYERS * 4.0 * KV_HEADS * HEAD_DIM * sum(metadata.seq_lens_list),
        num_operations=LAYERS * 4.0 * HEADS * HEAD_DIM * num_seen,
    )


def elementwise_workloads(kernels: NativeKernels) -> Iterator[Workload]:
    for m in (1, 32, 512):
        yield _norm_workload(kernels, m)
        yield _rotary_workload(kernels, m)


def _norm_workload(kernels: NativeKernels, m: int) -> Workload:
    x, weight = _random(m, HIDDEN), _random(HIDDEN)
    norm = RMSNorm(HIDDEN, 1e-5, dtype=torch.bfloat16, device=CPU)
    norm.weight.copy_(weight)
    return Workload(
        f"rms_norm.{m}_rows",
        lambda: [kernels.rms_norm(x, weight, 1e-5) for _ in range(LAYERS)],
        lambda: [norm(x) for _ in range(LAYERS)],
        num_bytes=0,
        num_operations=0,
    )


def _rotary_workload(kernels: NativeKernels, m: int) -> Workload:
    qkv, slots = _random(m, QKV), torch.randperm(m)
    angles, positions = torch.rand(m, HEAD_DIM // 2), torch.arange(m)
    cos, sin = angles.cos(), angles.sin()
    table = torch.cat((cos, sin), dim=-1)
    caches = _random(m, 1, KV_HEADS, HEAD_DIM), _random(m, 1, KV_HEADS, HEAD_DIM)
    rotation = Rotation(torch.cat((cos, cos), -1)[:, None].bfloat16(), torch.cat((sin, sin), -1)[:, None].bfloat16())

    def in_torch() -> None:
        for _ in range(LAYERS):
            q, k, v = qkv.view(m, -1, HEAD_DIM).tensor_split((HEADS, HEADS + KV_HEADS), dim=1)
            rotation.apply(q)
            caches[0].flatten(0, 1).index_copy_(0, slots, rotation.apply(k))
            caches[1].flatten(0, 1).index_copy_(0, slots, v)

    def native() -> None:
        for _ in range(LAYERS):
            kernels.rotary_and_cache(qkv, table, positions, slots, caches)

    return Workload(f"rotary_and_cache.{m}_rows", native, in_torch, num_bytes=0, num_operations=0)


def _metadata(sequences: list[tuple[int, int]], is_shuffled: bool) -> AttentionMetadata:
    query_lens, seq_lens = [list(lens) for lens in zip(*sequences, strict=True)]
    width = -(-max(seq_lens) // BLOCK_SIZE)
    blocks = torch.randperm(len(sequences) * width) if is_shuffled else torch.arange(len(sequences) * width)
    return AttentionMetadata(
        query_start_loc=F.pad(torch.tensor(query_lens).cumsum(0), (1, 0)).int(),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table=blocks.int().view(len(sequences), width),
        query_lens_list=query_lens,
        seq_lens_list=seq_lens,
        num_decodes=query_lens.count(1),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
    )


def _random(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16).normal_()
