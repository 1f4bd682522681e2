"""A loaded decoder, made to run on the native kernels: its parts are replaced, its shape is not."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from engine.model.config import ModelConfig
from engine.model.decoder import Decoder, Layer
from engine.model.layers import Linear, RMSNorm, RotaryEmbedding, SwiGLU
from engine.native.attention import NativeAttention, NativeRotaryEmbedding
from engine.native.kernels import NativeKernels, supports_attention
from engine.native.layer import LayerStep, NativeLayer, is_one_call
from engine.native.packing import supports_linear


def can_accelerate(model: Decoder, config: ModelConfig, dtype: torch.dtype) -> bool:
    """Whether the kernels know this model's dtype and shapes."""
    widths = [module.weight.shape[1] for module in model.modules() if isinstance(module, Linear)]
    fits = supports_attention(config.head_dim) and all(supports_linear(width) for width in widths)
    return dtype == torch.bfloat16 and fits


def accelerate(model: Decoder, kernels: NativeKernels) -> NativeAttention:
    """Pack every weight for the kernels, giving up the unpacked one, and return the attention that goes with them.

    A layer becomes one call where that is possible, else its parts do: a mixture of experts keeps torch's grouped
    products, and norms over heads stay torch's.
    """
    model.lm_head = cast(Linear, NativeLogits(model.lm_head, kernels))
    model.rotary = cast(RotaryEmbedding, NativeRotaryEmbedding(model.rotary, kernels))
    _replace_parts(model, kernels, LayerStep())
    return NativeAttention(kernels)


def _replace_parts(module: nn.Module, kernels: NativeKernels, step: LayerStep) -> None:
    for name, part in module.named_children():
        match part:
            case Layer() if is_one_call(part):
                setattr(module, name, NativeLayer(part, kernels, step))
            case SwiGLU():
                setattr(module, name, NativeSwiGLU(part, kernels))
            case Linear():
                setattr(module, name, NativeLinear(part, kernels))
            case RMSNorm() if not name.startswith(("q_", "k_")):  # those are over heads: rows that are not dense
                setattr(module, name, NativeRMSNorm(part, kernels))
            case _:
                _replace_parts(part, kernels, step)


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
