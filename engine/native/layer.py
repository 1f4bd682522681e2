"""A dense decoder layer's weights as the kernels read them."""

from __future__ import annotations

from torch import Tensor

from engine.kv_cache import KVCache
from engine.model.decoder import Layer
from engine.model.layers import SwiGLU
from engine.native import abi
from engine.native.kernels import NativeKernels, address_of
from engine.native.packing import Output, PackedLinear, WeightFormat


class PackedLayer:
    """Owns the weights that `operation` points to; the sums with the residual are rounded once, where torch's layer
    rounds twice."""

    def __init__(self, layer: Layer, kernels: NativeKernels, kv_cache: KVCache, weights: WeightFormat) -> None:
        attention, mlp = layer.self_attention, layer.mlp
        assert isinstance(mlp, SwiGLU)
        self._linears = (
            kernels.pack_linear(attention.qkv_proj.weight, attention.qkv_proj.bias, weights),
            kernels.pack_linear(attention.o_proj.weight, attention.o_proj.bias, weights),
            kernels.pack_swiglu(mlp.gate_up_proj.weight, mlp.gate_up_proj.bias, weights),
            kernels.pack_linear(mlp.down_proj.weight, mlp.down_proj.bias, weights),
        )
        self._norms = _norm_weights(layer)
        self.operation = abi.Layer()
        self._set_weights()
        self._set_attention(layer, kv_cache)

    @property
    def numbers_per_token(self) -> int:
        """What src/layer.h wants of a step's workspace."""
        qkv, o, _, down = self._linears
        return qkv.in_features + qkv.out_features + o.in_features + down.in_features

    def _set_weights(self) -> None:
        operation = self.operation
        operation.qkv, operation.o, operation.gate_up, operation.down = map(_operation, self._linears)
        operation.attention_norm, operation.mlp_norm = map(address_of, self._norms[:2])
        if self._norms[2:]:
            operation.q_norm, operation.k_norm = map(address_of, self._norms[2:])

    def _set_attention(self, layer: Layer, kv_cache: KVCache) -> None:
        operation, attention = self.operation, layer.self_attention
        keys, values = kv_cache.layer(attention.layer)
        assert keys.shape[2:] == (attention.num_kv_heads, attention.head_dim)
        operation.keys, operation.values = address_of(keys), address_of(values)
        operation.block_size = keys.shape[1]
        operation.heads, operation.kv_heads = attention.num_heads, attention.num_kv_heads
        operation.head_dim, operation.window = attention.head_dim, attention.window or 0
        operation.scale, operation.eps = attention.scale, layer.attention_norm.eps


def _norm_weights(layer: Layer) -> tuple[Tensor, ...]:
    """Before attention and before the MLP, then over the heads of q and k where the layer has those."""
    head_norms = layer.self_attention.head_norms
    over_heads = () if head_norms is None else (head_norms.q_norm, head_norms.k_norm)
    norms = (layer.attention_norm, layer.mlp_norm, *over_heads)
    assert all(norm.eps == layer.attention_norm.eps for norm in norms)
    return tuple(norm.weight for norm in norms)


def _operation(packed: PackedLinear) -> abi.Linear:
    operation = packed.operation
    operation.output = Output.SWIGLU if packed.is_swiglu else Output.BFLOAT16
    return operation
