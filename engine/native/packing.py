"""Weights in the order the kernels read them, see src/packed_weight.h."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

import torch
from torch import Tensor

from engine.native import abi

PANEL = 64  # columns of a packed weight that lie together


class Output(IntEnum):
    """As in src/linear.h."""

    BFLOAT16 = 0
    FLOAT32 = 1
    SWIGLU = 2


class WeightFormat(StrEnum):
    BFLOAT16 = "bfloat16"
    INT8 = "int8"  # a scale for each row of the weight, see src/int8_row.h


@dataclass
class PackedLinear:
    """One linear layer, owned by the engine it was packed for: `operation` is filled in anew for each call."""

    weight: Tensor  # [panels, in_features / 2, 64, 2] bfloat16, or as many codes in uint8, see src/int8_row.h
    in_features: int
    out_features: int  # of what is stored: for SwiGLU half the rows of the weight
    is_swiglu: bool
    scales: Tensor | None = None  # of the codes; [panels * 64] float32, in the order of the panels' columns
    bias: Tensor | None = None  # in the same order
    operation: abi.Linear = field(default_factory=abi.Linear, repr=False)

    @classmethod
    def empty(cls, rows: int, in_features: int, is_swiglu: bool, weights: WeightFormat) -> PackedLinear:
        panels, dtype = -(-rows // PANEL), torch.uint8 if weights is WeightFormat.INT8 else torch.bfloat16
        weight = torch.empty(panels, in_features // 2, PANEL, 2, dtype=dtype)
        layer = cls(weight, in_features, rows // 2 if is_swiglu else rows, is_swiglu)
        layer.operation.packed = weight.data_ptr()
        if weights is WeightFormat.INT8:
            layer.scales = torch.empty(panels * PANEL)
            layer.operation.scales = layer.scales.data_ptr()
        layer.operation.columns, layer.operation.k = layer.out_features, in_features
        return layer

    def set_bias(self, bias: Tensor) -> None:
        self.bias = bias
        self.operation.bias = bias.data_ptr()


def supports_linear(in_features: int) -> bool:
    """Numbers are multiplied in pairs."""
    return in_features % 2 == 0


def pack_bias(bias: Tensor, is_swiglu: bool) -> Tensor:
    """[panels * 64] float32 in the order of the panels' columns, zero where a panel has none."""
    panels = -(-bias.shape[0] // PANEL)
    if not is_swiglu:
        packed = torch.zeros(panels * PANEL)
        packed[: bias.shape[0]] = bias
        return packed
    halves = torch.zeros(2, panels * PANEL // 2)
    halves[:, : bias.shape[0] // 2] = bias.view(2, -1)
    return halves.view(2, panels, PANEL // 2).transpose(0, 1).reshape(-1)
