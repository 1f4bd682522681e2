"""Rotary embedding and attention as the decoder calls them, on the native kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.base import AttentionMetadata
from engine.kv_cache import KVCache
from engine.model.layers import RotaryEmbedding
from engine.native.kernels import NativeKernels


@dataclass(frozen=True)
class NativeRotation:
    """One step's angles, each [num_tokens, head_dim / 2] float32; the same tensors for every layer."""

    cos: Tensor
    sin: Tensor
    kernels: NativeKernels

    def into_cache(self, qkv: Tensor, kv_cache: KVCache, layer: int, slot_mapping: Tensor) -> Tensor:
        key_cache, value_cache = kv_cache.layer(layer)
        flat = qkv.view(qkv.shape[0], -1)
        return self.kernels.rotary_and_cache(flat, self.cos, self.sin, slot_mapping, key_cache, value_cache)


class NativeRotaryEmbedding:
    def __init__(self, rotary: RotaryEmbedding, kernels: NativeKernels) -> None:
        self._frequencies = rotary.frequencies
        self._kernels = kernels

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> NativeRotation:
        angles = positions[:, None].float() * self._frequencies
        return NativeRotation(angles.cos(), angles.sin(), self._kernels)


class NativeAttention:
    """The AttentionBackend of the native kernels: reads the block table directly, no gather and no padding."""

    name = "native"

    def __init__(self, kernels: NativeKernels) -> None:
        self._kernels = kernels

    def __call__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        return self._kernels.attention(query, key_cache, value_cache, metadata, scale, window)
