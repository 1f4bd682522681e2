"""The parts a Llama-family layer is made of. Weights are uninitialised until weights.py fills them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.kv_cache import KVCache
from engine.model.config import Llama3Scaling, RopeConfig


class Linear(nn.Module):
    """nn.Linear without the random initialisation, which takes longer than loading the weights."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = _parameter((out_features, in_features), dtype, device)
        self.bias = _parameter((out_features,), dtype, device) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Embedding(nn.Module):
    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = _parameter((vocab_size, hidden_size), dtype, device)

    def forward(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.weight)


class RMSNorm(nn.Module):
    """Normalises in float32 and scales in the model's dtype, in that order: what the reference weights expect."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = _parameter((size,), dtype, device)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * x32.to(x.dtype)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up being one matrix: rows [0, intermediate) and the rest."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size, bias=False, dtype=dtype, device=device)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=False, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        out: Tensor = self.down_proj(F.silu(gate) * up)
        return out


@dataclass(frozen=True)
class Rotation:
    """How far one step's tokens are turned, each [num_tokens, 1, head_dim]; shared by all layers."""

    cos: Tensor
    sin: Tensor

    def into_cache(self, qkv: Tensor, kv_cache: KVCache, layer: int, slot_mapping: Tensor) -> Tensor:
        """Turn q and k of [T, H + 2 G, D], store k and v at the step's slots; q [T, H, D]."""
        num_kv_heads = kv_cache.shape.num_kv_heads
        q, k, v = torch.split(qkv, [qkv.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)
        kv_cache.write(layer, self.apply(k), v, slot_mapping)
        return self.apply(q)

    def apply(self, x: Tensor) -> Tensor:
        """x [num_tokens, heads, head_dim], each pair (x[i], x[i + head_dim / 2]) turned by its angle."""
        first, second = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat((-second, first), dim=-1) * self.sin


class RotaryEmbedding:
    """Angles of position * frequency (RoFormer, Su et al. 2021)."""

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device) -> None:
        self.frequencies = rotary_frequencies(rope, head_dim).to(device)  # [head_dim / 2] float32

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        half = positions[:, None].float() * self.frequencies  # [num_tokens, head_dim / 2]
        angles = torch.cat((half, half), dim=-1)[:, None, :]
        return Rotation(angles.cos().to(dtype), angles.sin().to(dtype))


def rotary_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position for each pair of dimensions, scaling applied: [head_dim / 2] float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.llama3 is not None:
        return _scale_as_llama3(frequencies, rope.llama3)
    if rope.frequency_divisors:
        return frequencies / torch.tensor(rope.frequency_divisors, dtype=torch.float32)
    return frequencies / rope.linear_factor


def _scale_as_llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Published with Llama 3.1: waves longer than the old context are stretched, short ones left alone."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)  # within the old context
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1.0 - blend) * frequencies / scaling.factor + blend * frequencies


def _parameter(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
