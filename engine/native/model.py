"""A loaded model, made to run on the native kernels: whole where they know all of it, else part by part."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from engine.forward import EagerForward, Forward
from engine.kv_cache import KVCache
from engine.model.decoder import HeadNorms
from engine.model.layers import Linear, RMSNorm, RotaryEmbedding, SwiGLU
from engine.model.weights import LoadedModel
from engine.native.attention import NativeAttention, NativeRotaryEmbedding, angle_table
from engine.native.forward import NativeForward
from engine.native.kernels import HEAD_DIM_STEP, MAX_GROUP, MAX_HEAD_DIM, NativeKernels, supports_attention
from engine.native.packing import WeightFormat, supports_linear


def misfit(loaded: LoadedModel) -> str | None:
    """Why the kernels cannot compute this model: its dtype, or the first shape that does not suit; None: they can."""
    model, config = loaded.model, loaded.config
    group = config.num_heads // config.num_kv_heads
    if model.dtype != torch.bfloat16:
        return f"they compute in bfloat16, the model in {str(model.dtype).removeprefix('torch.')}"
    if not supports_attention(config.head_dim, group):
        return (
            f"head_dim is {config.head_dim} with {group} query heads to a kv head; they take multiples of "
            f"{HEAD_DIM_STEP} up to {MAX_HEAD_DIM}, and {MAX_GROUP} heads"
        )
    for name, module in model.named_modules():
        if isinstance(module, Linear) and not supports_linear(module.weight.shape[1]):
            return f"{name} takes {module.weight.shape[1]} numbers, and they multiply pairs"
    return None


def accelerate(
    loaded: LoadedModel, kernels: NativeKernels, kv_cache: KVCache, weights: WeightFormat = WeightFormat.BFLOAT16
) -> Forward:
    """Pack every weight for the kernels, taking the unpacked one from the model, which is of no other use afterwards.

    A mixture of experts keeps torch's grouped products, so such a model calls its parts one by one.
    """
    model, config = loaded.model, loaded.config
    num_slots = kv_cache.shape.num_blocks * kv_cache.shape.block_size  # no sequence is longer
    angles = angle_table(model.rotary, min(config.max_position_embeddings, num_slots))
    if config.experts is None:
        return NativeForward(model, kernels, kv_cache, angles, weights)
    assert weights is WeightFormat.BFLOAT16  # experts are most of such a model, and they would stay as they are
    model.lm_head = cast(Linear, NativeLogits(model.lm_head, kernels))
    model.rotary = cast(RotaryEmbedding, NativeRotaryEmbedding(angles, kernels))
    _replace_parts(model, kernels)
    return EagerForward(model, kv_cache, NativeAttention(kernels))


def _replace_parts(module: nn.Module, kernels: NativeKernels) -> None:
    for name, part in module.named_children():
        match part:
            case SwiGLU():
                setattr(module, name, NativeSwiGLU(part, kernels))
            case Linear():
                setattr(module, name, NativeLinear(part, kernels))
            case RMSNorm():
                setattr(module, name, NativeRMSNorm(part, kernels))
            case HeadNorms():
                setattr(module, name, NativeHeadNorms(part, kernels))
            case _:
                _replace_parts(part, kernels)


class NativeLinear(nn.Module):
    def __init__(self, linear: Linear, kernels: NativeKernels) -> None:
        super().__init__()
        self._kernels = kernels
        self._packed = kernels.pack_linear(linear.weight, linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self._kernels.linear(x, self._packed)


class NativeLogits(NativeLinear):
    """Logits are compared, so they keep float32."""

    def forward(self, x: Tensor) -> Tensor:
        return self._kernels.linear_float32(x, self._packed)


class NativeSwiGLU(nn.Module):
    def __init__(self, mlp: SwiGLU, kernels: NativeKernels) -> None:
        super().__init__()
        self._kernels = kernels
        self._gate_up = kernels.pack_swiglu(mlp.gate_up_proj.weight, mlp.gate_up_proj.bias)
        self._down = kernels.pack_linear(mlp.down_proj.weight, mlp.down_proj.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self._kernels.linear(self._kernels.swiglu(x, self._gate_up), self._down)


class NativeRMSNorm(nn.Module):
    def __init__(self, norm: RMSNorm, kernels: NativeKernels) -> None:
        super().__init__()
        self._kernels = kernels
        self._weight, self._eps = norm.weight, norm.eps

    def forward(self, x: Tensor) -> Tensor:
        return self._kernels.rms_norm(x, self._weight, self._eps)


class NativeHeadNorms(nn.Module):
    def __init__(self, norms: HeadNorms, kernels: NativeKernels) -> None:
        super().__init__()
        assert norms.q_norm.eps == norms.k_norm.eps
        self._kernels = kernels
        self._q_weight, self._k_weight, self._eps = norms.q_norm.weight, norms.k_norm.weight, norms.q_norm.eps
        self._num_kv_heads = norms.num_kv_heads

    def forward(self, qkv: Tensor) -> Tensor:
        """Changed in place, and returned."""
        self._kernels.head_norms(qkv, self._q_weight, self._k_weight, self._num_kv_heads, self._eps)
        return qkv
