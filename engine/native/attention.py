"""Rotary embedding and attention as the decoder calls them, on the native kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.base import AttentionMetadata
from engine.kv_cache import KVCache
from engine.model.layers import RotaryEmbedding
from engine.native.kernels import NativeKernels


def angle_table(rotary: RotaryEmbedding, num_positions: int) -> Tensor:
    """How far each position is turned, computed once: [num_positions, head_dim] float32, cosines and then sines."""
    angles = torch.arange(num_positions)[:, None].float() * rotary.frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


@dataclass(frozen=True)
class NativeRotation:
    """One step's positions [num_tokens] in the table of angles; the same for every layer."""

    angles: Tensor
    positions: Tensor
    kernels: NativeKernels

    def into_cache(self, qkv: Tensor, kv_cache: KVCache, layer: int, slot_mapping: Tensor) -> Tensor:
        flat, caches = qkv.view(qkv.shape[0], -1), kv_cache.layer(layer)
        return self.kernels.rotary_and_cache(flat, self.angles, self.positions, slot_mapping, caches)


class NativeRotaryEmbedding:
    def __init__(self, angles: Tensor, kernels: NativeKernels) -> None:
        self._angles = angles
        self._kernels = kernels

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> NativeRotation:
        """Raises: IndexError."""
        if positions.max() >= self._angles.shape[0]:
            raise IndexError(f"a position is not within [0, {self._angles.shape[0]})")
        return NativeRotation(self._angles, positions, self._kernels)


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
