"""The kernels as Python calls them: contiguous bfloat16 tensors on the CPU in, bfloat16 out, sums in float32.

A row's result depends on neither the number of threads nor the rest of the batch. Not thread-safe: one engine, one
NativeKernels, on the engine's thread. Wrong shapes and dtypes are our own bugs, hence asserts. The operations one by
one serve models that cannot be called whole, tests and benches; a dense model's step is embed, layers, logits.
"""

from __future__ import annotations

import ctypes
import weakref

import torch
from torch import Tensor

from engine.attention.base import AttentionMetadata
from engine.native import abi
from engine.native.packing import Output, PackedLinear, WeightFormat, pack_bias, supports_linear

MAX_HEAD_DIM = 256
HEAD_DIM_STEP = 32
MAX_GROUP = 192  # query heads that share a kv head: kQueryRows in src/softmax.h


def supports_attention(head_dim: int, group: int) -> bool:
    """group: how many query heads share a kv head."""
    return head_dim % HEAD_DIM_STEP == 0 and head_dim <= MAX_HEAD_DIM and group <= MAX_GROUP


class NativeKernels:
    def __init__(self, library: ctypes.CDLL, num_threads: int) -> None:
        self.num_threads = num_threads
        self._library = library
        self._handle = ctypes.c_void_p(library.kernels_create(num_threads))
        weakref.finalize(self, library.kernels_destroy, self._handle)

    # ---------------------------------------------------------------- linear layers

    def pack_linear(
        self, weight: Tensor, bias: Tensor | None = None, weights: WeightFormat = WeightFormat.BFLOAT16
    ) -> PackedLinear:
        """weight [out_features, in_features]; see packing.supports_linear."""
        return self._pack(weight, bias, weights, is_swiglu=False)

    def pack_swiglu(
        self, weight: Tensor, bias: Tensor | None = None, weights: WeightFormat = WeightFormat.BFLOAT16
    ) -> PackedLinear:
        """weight [2 * intermediate, in_features]: the gate's rows, then the up projection's."""
        return self._pack(weight, bias, weights, is_swiglu=True)

    def linear(self, x: Tensor, weight: PackedLinear, residual: Tensor | None = None) -> Tensor:
        """x [m, in_features] · weightᵀ + bias + residual [m, out_features], rounded once."""
        assert not weight.is_swiglu
        return self._linear(x, weight, residual, Output.BFLOAT16)

    def linear_float32(self, x: Tensor, weight: PackedLinear) -> Tensor:
        """Not rounded to bfloat16, for logits: [m, out_features] float32."""
        assert not weight.is_swiglu
        return self._linear(x, weight, None, Output.FLOAT32)

    def swiglu(self, x: Tensor, gate_up: PackedLinear) -> Tensor:
        """silu(x · gateᵀ) * (x · upᵀ): [m, intermediate], rounded once."""
        assert gate_up.is_swiglu
        return self._linear(x, gate_up, None, Output.SWIGLU)

    def _pack(self, weight: Tensor, bias: Tensor | None, weights: WeightFormat, *, is_swiglu: bool) -> PackedLinear:
        rows, in_features = weight.shape
        assert weight.dtype == torch.bfloat16
        assert supports_linear(in_features)
        assert not is_swiglu or rows % 2 == 0
        packed, weight = PackedLinear.empty(rows, in_features, is_swiglu, weights), weight.contiguous()
        given, to = abi.Weight(weight.data_ptr(), rows, in_features, is_swiglu), packed.weight.data_ptr()
        if packed.scales is None:
            self._library.kernels_pack_weight(self._handle, given, to)
        else:
            self._library.kernels_pack_weight_int8(self._handle, given, to, packed.scales.data_ptr())
        if bias is not None:
            packed.set_bias(pack_bias(bias, is_swiglu))
        return packed

    def _linear(self, x: Tensor, weight: PackedLinear, residual: Tensor | None, output: Output) -> Tensor:
        m, in_features = x.shape
        assert in_features == weight.in_features
        y = torch.empty(m, weight.out_features, dtype=torch.float32 if output is Output.FLOAT32 else torch.bfloat16)
        operation = weight.operation
        assert residual is None or residual.shape == y.shape
        operation.x, operation.y, operation.m, operation.output = address_of(x), y.data_ptr(), m, output
        operation.residual = None if residual is None else address_of(residual)
        self._library.kernels_linear(self._handle, operation)
        return y

    # ---------------------------------------------------------------- normalisation

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [m, n], weight [n]: [m, n]; rounded where engine.model.layers.RMSNorm rounds."""
        y, (m, n) = torch.empty_like(x), x.shape
        assert weight.shape == (n,)
        operation = abi.RmsNorm(address_of(x), address_of(weight), y.data_ptr(), m, n, eps)
        self._library.kernels_rms_norm(self._handle, operation)
        return y

    def head_norms(self, qkv: Tensor, q_weight: Tensor, k_weight: Tensor, num_kv_heads: int, eps: float) -> None:
        """rms_norm of each head's q and k; qkv [tokens, heads + 2 * num_kv_heads, head_dim] is changed in place."""
        tokens, all_heads, head_dim = qkv.shape
        assert q_weight.shape == k_weight.shape == (head_dim,)
        operation = abi.HeadNorms(address_of(qkv), address_of(q_weight), address_of(k_weight), tokens)
        operation.heads, operation.kv_heads = all_heads - 2 * num_kv_heads, num_kv_heads
        operation.head_dim, operation.eps = head_dim, eps
        self._library.kernels_head_norms(self._handle, operation)

    # ---------------------------------------------------------------- attention

    def rotary_and_cache(
        self, qkv: Tensor, angles: Tensor, positions: Tensor, slot_mapping: Tensor, caches: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Turn q and k by their angles; k and v go to their slots, q stays where it is.

        qkv [tokens, (heads + 2 * kv_heads) * head_dim], changed in place; angles as attention.angle_table gives them,
        and positions [tokens] int64 within them; slot_mapping [tokens] int64; the caches of K and V [num_blocks,
        block_size, kv_heads, head_dim].
        Returns q, a view of qkv: [tokens, heads, head_dim].
        """
        (tokens, width), (_, _, kv_heads, head_dim) = qkv.shape, caches[0].shape
        heads = width // head_dim - 2 * kv_heads
        assert head_dim % HEAD_DIM_STEP == 0
        assert angles.shape[1] == head_dim
        assert positions.shape == slot_mapping.shape == (tokens,)
        operation = abi.RotaryAndCache(address_of(qkv), address_of(angles, torch.float32))
        operation.positions, operation.slots = (address_of(each, torch.int64) for each in (positions, slot_mapping))
        operation.keys, operation.values = map(address_of, caches)
        operation.tokens, operation.heads, operation.kv_heads, operation.head_dim = tokens, heads, kv_heads, head_dim
        self._library.kernels_rotary_and_cache(self._handle, operation)
        return qkv.as_strided((tokens, heads, head_dim), (width, head_dim, 1))

    def attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        """As an AttentionBackend, see engine/attention/base.py; query may be rows of a wider tensor.

        window: how many tokens a query sees, itself included; None: all before it. Shapes: supports_attention.
        Returns a dense [tokens, heads, head_dim].
        """
        tokens, heads, head_dim = query.shape
        assert supports_attention(head_dim, heads // key_cache.shape[2])
        assert query.dtype == torch.bfloat16
        assert query.stride()[1:] == (head_dim, 1)
        out = torch.empty(tokens, heads, head_dim, dtype=torch.bfloat16)
        operation = abi.Attention(query.data_ptr(), query.stride(0), address_of(key_cache), address_of(value_cache))
        operation.out, operation.heads, operation.scale, operation.window = out.data_ptr(), heads, scale, window or 0
        _, operation.block_size, operation.kv_heads, operation.head_dim = key_cache.shape
        operation.sequences, operation.table_width = metadata.block_table.shape
        operation.block_table = address_of(metadata.block_table, torch.int32)
        operation.query_start = address_of(metadata.query_start_loc, torch.int32)
        operation.seq_lens = address_of(metadata.seq_lens, torch.int32)
        self._library.kernels_attention(self._handle, operation)
        return out

    # ---------------------------------------------------------------- a dense model's step, see forward.py

    def embed(self, model: abi.Model, step: abi.ModelStep) -> None:
        """Raises: IndexError when a token or a position is none of the model's."""
        if not self._library.kernels_embed(self._handle, model, step):
            raise IndexError(
                f"a token is not within [0, {model.vocab_size}) or a position not within [0, {model.num_positions})"
            )

    def layers(self, model: abi.Model, step: abi.ModelStep, begin: int, end: int) -> None:
        self._library.kernels_layers(self._handle, model, step, begin, end)

    def logits(self, model: abi.Model, step: abi.ModelStep) -> None:
        self._library.kernels_logits(self._handle, model, step)

    def sample(self, operation: abi.Sampling) -> None:
        """See sampling.py."""
        self._library.kernels_sample(self._handle, operation)

    # ---------------------------------------------------------------- limits of the machine

    def read_memory(self, data: Tensor) -> None:
        """Read a contiguous tensor once with all threads, up to the last whole 256 KB; for benches."""
        self._library.kernels_read_memory(self._handle, data.data_ptr(), data.numel() * data.element_size())

    def multiply_registers(self, count: int) -> None:
        """bf16 dot products from registers alone, for benches; operations_per_count says how many."""
        self._library.kernels_multiply_registers(self._handle, count)

    @property
    def operations_per_count(self) -> int:
        return 24 * 64 * self.num_threads


def address_of(tensor: Tensor, dtype: torch.dtype = torch.bfloat16) -> int:
    """Of a dense tensor's first number."""
    assert tensor.dtype is dtype
    assert tensor.is_contiguous()
    return tensor.data_ptr()
