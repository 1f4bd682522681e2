"""A whole decoder layer in one call of the kernels: a step of a small model is short, and calls from Python add up."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.attention.base import AttentionBackend
from engine.batch import Batch
from engine.kv_cache import KVCache
from engine.model.decoder import Layer
from engine.model.layers import SwiGLU
from engine.native import abi
from engine.native.attention import NativeAttention, NativeRotation
from engine.native.kernels import NativeKernels
from engine.native.packing import Output, PackedLinear


def is_one_call(layer: Layer) -> bool:
    """Whether src/layer.h knows all that this layer does."""
    return isinstance(layer.mlp, SwiGLU) and layer.self_attention.head_norms is None


class LayerStep:
    """What all layers of a model share: the step's tensors as the kernels take them, and room for what lies between
    their operations, kept from step to step."""

    def __init__(self) -> None:
        self.operation = abi.LayerStep()
        self._workspace = torch.empty(0, dtype=torch.bfloat16)
        self._capacity = 0
        self._rotation: NativeRotation | None = None
        self._batch: Batch | None = None

    def prepare(self, rotation: NativeRotation, batch: Batch, numbers_per_token: int) -> None:
        """Called by each layer; only a step's first finds something to do."""
        if rotation is not self._rotation or batch is not self._batch:
            self._set(rotation, batch)
        needed = self.operation.tokens * numbers_per_token
        if needed > self._capacity:
            self._workspace = torch.empty(needed, dtype=torch.bfloat16)
            self._capacity, self.operation.workspace = needed, self._workspace.data_ptr()

    def _set(self, rotation: NativeRotation, batch: Batch) -> None:
        operation, metadata, tokens = self.operation, batch.attention, batch.token_ids.shape[0]
        int32 = metadata.block_table, metadata.query_start_loc, metadata.seq_lens
        assert all(tensor.dtype is torch.int32 and tensor.is_contiguous() for tensor in int32)
        assert all(each.dtype is torch.float32 and each.is_contiguous() for each in (rotation.cos, rotation.sin))
        assert rotation.cos.shape == rotation.sin.shape
        assert rotation.cos.shape[0] == tokens
        assert batch.slot_mapping.dtype is torch.int64
        assert batch.slot_mapping.shape == (tokens,)
        assert batch.slot_mapping.is_contiguous()
        operation.tokens, operation.slots = tokens, batch.slot_mapping.data_ptr()
        operation.cos, operation.sin = rotation.cos.data_ptr(), rotation.sin.data_ptr()
        operation.sequences, operation.table_width = metadata.block_table.shape
        operation.block_table, operation.query_start, operation.seq_lens = (tensor.data_ptr() for tensor in int32)
        self._rotation, self._batch = rotation, batch  # and so the tensors live as long as their addresses are here


class NativeLayer(nn.Module):
    """Stands in for a Layer. The sum with the residual is rounded once, where the parts round twice."""

    def __init__(self, layer: Layer, kernels: NativeKernels, step: LayerStep) -> None:
        super().__init__()
        attention, mlp = layer.self_attention, layer.mlp
        assert is_one_call(layer)
        assert isinstance(mlp, SwiGLU)
        self._kernels, self._step = kernels, step
        self._index = attention.layer
        self._norms = layer.attention_norm.weight, layer.mlp_norm.weight
        self._linears = (
            kernels.pack_linear(attention.qkv_proj.weight, attention.qkv_proj.bias),
            kernels.pack_linear(attention.o_proj.weight, attention.o_proj.bias),
            kernels.pack_swiglu(mlp.gate_up_proj.weight, mlp.gate_up_proj.bias),
            kernels.pack_linear(mlp.down_proj.weight, mlp.down_proj.bias),
        )
        self._kv_cache: KVCache | None = None
        self._operation = abi.Layer()
        self._fill_in(layer)

    def forward(
        self, x: Tensor, rotation: NativeRotation, batch: Batch, kv_cache: KVCache, attention: AttentionBackend
    ) -> Tensor:
        """x [T, hidden] is changed in place, and returned. `attention` is part of the call, and so is checked only."""
        assert isinstance(attention, NativeAttention)
        if kv_cache is not self._kv_cache:
            self._set_kv_cache(kv_cache)
        self._step.prepare(rotation, batch, self._numbers_per_token)
        assert x.shape == (self._step.operation.tokens, self._hidden_size)
        assert x.dtype is torch.bfloat16
        assert x.is_contiguous()
        self._kernels.layer(x, self._operation, self._step.operation)
        return x

    def _fill_in(self, layer: Layer) -> None:
        operation, attention = self._operation, layer.self_attention
        assert layer.attention_norm.eps == layer.mlp_norm.eps
        assert all(norm.dtype is torch.bfloat16 and norm.is_contiguous() for norm in self._norms)
        operation.attention_norm, operation.mlp_norm = (norm.data_ptr() for norm in self._norms)
        operation.qkv, operation.o, operation.gate_up, operation.down = map(_operation, self._linears)
        operation.heads, operation.kv_heads = attention.num_heads, attention.num_kv_heads
        operation.head_dim, operation.window = attention.head_dim, attention.window or 0
        operation.scale, operation.eps = attention.scale, layer.attention_norm.eps
        qkv, o, _, down = self._linears
        self._hidden_size = qkv.in_features
        self._numbers_per_token = qkv.in_features + qkv.out_features + o.in_features + down.in_features

    def _set_kv_cache(self, kv_cache: KVCache) -> None:
        keys, values = kv_cache.layer(self._index)
        operation = self._operation
        assert keys.dtype is torch.bfloat16
        assert keys.shape[2:] == (operation.kv_heads, operation.head_dim)
        assert keys.is_contiguous()
        assert values.is_contiguous()
        operation.keys, operation.values = keys.data_ptr(), values.data_ptr()
        operation.block_size = keys.shape[1]
        self._kv_cache = kv_cache


def _operation(packed: PackedLinear) -> abi.Linear:
    operation = packed.operation
    operation.output = Output.SWIGLU if packed.is_swiglu else Output.BFLOAT16
    return operation
