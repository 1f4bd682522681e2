"""The kernels as Python calls them: contiguous bfloat16 tensors on the CPU in, bfloat16 out, sums in float32.

A row's result depends on neither the number of threads nor the rest of the batch. Not thread-safe: one engine, one
NativeKernels, on the engine's thread. Wrong shapes and dtypes are our own bugs, hence asserts; the structures passed to
C are kept and only their changing fields set, as a decode step of a small model makes hundreds of these calls where it
cannot call a layer at once.
"""

from __future__ import annotations

import ctypes
import weakref

import torch
from torch import Tensor

from engine.attention.base import AttentionMetadata
from engine.native import abi
from engine.native.packing import Output, PackedLinear, pack_bias, supports_linear

MAX_HEAD_DIM = 256
HEAD_DIM_STEP = 32


def supports_attention(head_dim: int) -> bool:
    return head_dim % HEAD_DIM_STEP == 0 and head_dim <= MAX_HEAD_DIM


class NativeKernels:
    def __init__(self, library: ctypes.CDLL, num_threads: int) -> None:
        self.num_threads = num_threads
        self._library = library
        self._handle = ctypes.c_void_p(library.kernels_create(num_threads))
        self._norm, self._rotary = abi.RmsNorm(), abi.RotaryAndCache()
        self._attention = abi.Attention()
        self._attention_step: AttentionMetadata | None = None
        self._rotary_step: tuple[Tensor, Tensor, Tensor] | None = None
        weakref.finalize(self, library.kernels_destroy, self._handle)

    # ---------------------------------------------------------------- linear layers

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        """weight [out_features, in_features]; see packing.supports_linear."""
        return self._pack(weight, bias, is_swiglu=False)

    def pack_swiglu(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        """weight [2 * intermediate, in_features]: the gate's rows, then the up projection's."""
        return self._pack(weight, bias, is_swiglu=True)

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

    def _pack(self, weight: Tensor, bias: Tensor | None, *, is_swiglu: bool) -> PackedLinear:
        rows, in_features = weight.shape
        assert weight.dtype == torch.bfloat16
        assert supports_linear(in_features)
        assert not is_swiglu or rows % 2 == 0
        packed = PackedLinear.empty(rows, in_features, is_swiglu)
        weight = weight.contiguous()
        self._library.kernels_pack_weight(
            self._handle, weight.data_ptr(), rows, in_features, is_swiglu, packed.weight.data_ptr()
        )
        if bias is not None:
            packed.set_bias(pack_bias(bias, is_swiglu))
        return packed

    def _linear(self, x: Tensor, weight: PackedLinear, residual: Tensor | None, output: Output) -> Tensor:
        m, in_features = x.shape
        assert in_features == weight.in_features
        assert _is_dense(x)
        y = torch.empty(m, weight.out_features, dtype=torch.float32 if output is Output.FLOAT32 else torch.bfloat16)
        operation = weight.operation
        operation.x, operation.y, operation.m, operation.output = x.data_ptr(), y.data_ptr(), m, output
        if residual is None:
            operation.residual = None
        else:
            assert residual.shape == y.shape
            assert _is_dense(residual)
            operation.residual = residual.data_ptr()
        self._library.kernels_linear(self._handle, operation)
        return y

    # ---------------------------------------------------------------- normalisation

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [m, n], weight [n]: [m, n]; rounded where engine.model.layers.RMSNorm rounds."""
        y = torch.empty_like(x)
        self._norm.residual = None
        self._rms_norm(x, weight, eps, y)
        return y

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """x + residual, and that normalised; both [m, n]."""
        assert residual.shape == x.shape
        assert _is_dense(residual)
        total, y = torch.empty_like(x), torch.empty_like(x)
        self._norm.residual, self._norm.sum = residual.data_ptr(), total.data_ptr()
        self._rms_norm(x, weight, eps, y)
        return total, y

    def _rms_norm(self, x: Tensor, weight: Tensor, eps: float, y: Tensor) -> None:
        operation = self._norm
        operation.m, operation.n = x.shape
        operation.x, operation.weight, operation.y = x.data_ptr(), weight.data_ptr(), y.data_ptr()
        operation.eps = eps
        assert weight.shape == x.shape[1:]
        assert _is_dense(x)
        assert _is_dense(weight)
        self._library.kernels_rms_norm(self._handle, operation)

    # ---------------------------------------------------------------- attention

    def rotary_and_cache(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, slot_mapping: Tensor, key_cache: Tensor, value_cache: Tensor
    ) -> Tensor:
        """Turn q and k by their angles; k and v go to their slots, q stays where it is.

        qkv [tokens, (heads + 2 * kv_heads) * head_dim], changed in place; cos, sin [tokens, head_dim / 2] float32;
        slot_mapping [tokens] int64; the caches [num_blocks, block_size, kv_heads, head_dim].
        Returns q, a view of qkv: [tokens, heads, head_dim].
        """
        tokens, width = qkv.shape
        _, _, kv_heads, head_dim = key_cache.shape
        heads = width // head_dim - 2 * kv_heads
        assert head_dim % HEAD_DIM_STEP == 0
        assert _is_dense(qkv)
        assert _is_dense(key_cache)
        assert _is_dense(value_cache)
        operation = self._rotary
        operation.qkv, operation.keys, operation.values = qkv.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr()
        operation.heads, operation.kv_heads, operation.head_dim = heads, kv_heads, head_dim
        self._set_rotary_step(cos, sin, slot_mapping)
        assert operation.tokens == tokens
        assert cos.shape[1] * 2 == head_dim
        self._library.kernels_rotary_and_cache(self._handle, operation)
        return qkv.as_strided((tokens, heads, head_dim), (width, head_dim, 1))

    def _set_rotary_step(self, cos: Tensor, sin: Tensor, slot_mapping: Tensor) -> None:
        """What all layers of a step have in common."""
        step = self._rotary_step
        if step is not None and step[0] is cos and step[1] is sin and step[2] is slot_mapping:
            return
        assert cos.shape == sin.shape
        assert slot_mapping.shape == cos.shape[:1]
        assert _is_dense(cos, torch.float32)
        assert _is_dense(sin, torch.float32)
        assert _is_dense(slot_mapping, torch.int64)
        operation = self._rotary
        operation.cos, operation.sin, operation.slots = cos.data_ptr(), sin.data_ptr(), slot_mapping.data_ptr()
        operation.tokens = cos.shape[0]
        self._rotary_step = cos, sin, slot_mapping

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

        window: how many tokens a query sees, itself included; None: all before it. head_dim: supports_attention.
        Returns a dense [tokens, heads, head_dim].
        """
        tokens, heads, head_dim = query.shape
        assert supports_attention(head_dim)
        assert query.dtype == torch.bfloat16
        assert query.stride()[1:] == (head_dim, 1)
        assert _is_dense(key_cache)
        assert _is_dense(value_cache)
        out = torch.empty(tokens, heads, head_dim, dtype=torch.bfloat16)
        operation = self._attention
        operation.query, operation.query_stride, operation.out = query.data_ptr(), query.stride(0), out.data_ptr()
        operation.keys, operation.values = key_cache.data_ptr(), value_cache.data_ptr()
        _, operation.block_size, operation.kv_heads, operation.head_dim = key_cache.shape
        operation.heads, operation.scale, operation.window = heads, scale, window or 0
        self._set_attention_step(metadata)
        self._library.kernels_attention(self._handle, operation)
        return out

    def _set_attention_step(self, metadata: AttentionMetadata) -> None:
        """What all layers of a step have in common."""
        if metadata is self._attention_step:
            return
        table, operation = metadata.block_table, self._attention
        for tensor in (table, metadata.query_start_loc, metadata.seq_lens):
            assert _is_dense(tensor, torch.int32)
        operation.sequences, operation.table_width = table.shape
        operation.block_table = table.data_ptr()
        operation.query_start, operation.seq_lens = metadata.query_start_loc.data_ptr(), metadata.seq_lens.data_ptr()
        self._attention_step = metadata

    # ---------------------------------------------------------------- all of these

    def layer(self, x: Tensor, layer: abi.Layer, step: abi.LayerStep) -> None:
        """One dense decoder layer, see layer.py; x, a dense [tokens, hidden], is changed in place."""
        self._library.kernels_layer(self._handle, layer, step, x.data_ptr())

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


def _is_dense(tensor: Tensor, dtype: torch.dtype = torch.bfloat16) -> bool:
    return tensor.dtype is dtype and tensor.is_contiguous()
