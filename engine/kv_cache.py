"""The paged KV cache: one tensor, cut into blocks, read by attention and by KV transfer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.populate import populate

POPULATE_S = 2.0  # 1 GiB takes half a second, or many where a virtual machine's host has to find it


@dataclass(frozen=True)
class KVCacheShape:
    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int

    @property
    def num_elements_per_block(self) -> int:
        return self.num_layers * 2 * self.block_size * self.num_kv_heads * self.head_dim


class KVCache:
    """K and V of every cached token. slot = block_id * block_size + offset within the block.

    Only the engine's thread touches it. The memory is not cleared: a slot holds garbage until written.
    """

    def __init__(self, shape: KVCacheShape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self._slots = torch.empty(
            (shape.num_layers, 2, shape.num_blocks * shape.block_size, shape.num_kv_heads, shape.head_dim),
            dtype=dtype,
            device=device,
        )
        self._blocks = self._slots.view(
            shape.num_layers, 2, shape.num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim
        )

    def populate(self) -> None:
        """Have the system give all of the memory now, rather than page by page to steps that others wait for."""
        populate(self._slots, POPULATE_S)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer, each [num_blocks, block_size, num_kv_heads, head_dim]; views, not copies."""
        return self._blocks[index, 0], self._blocks[index, 1]

    def write(self, layer: int, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """Store this step's K and V ([num_tokens, num_kv_heads, head_dim]) at slots [num_tokens] int64."""
        self._slots[layer, 0].index_copy_(0, slot_mapping, key)
        self._slots[layer, 1].index_copy_(0, slot_mapping, value)

    def read_slots(self, layer_start: int, layer_end: int, slots: Tensor) -> Tensor:
        """A fresh contiguous copy of some layers' K and V: [layers, 2, len(slots), num_kv_heads, head_dim]."""
        return self._slots[layer_start:layer_end].index_select(2, slots)

    def write_slots(self, layer_start: int, slots: Tensor, data: Tensor, head_start: int = 0) -> None:
        """Scatter what read_slots gave, or some heads of it, possibly on another worker, into this cache's slots."""
        num_layers, num_heads = data.shape[0], data.shape[3]
        layers = slice(layer_start, layer_start + num_layers)
        heads = slice(head_start, head_start + num_heads)
        self._slots[layers, :, :, heads].index_copy_(2, slots, data)
