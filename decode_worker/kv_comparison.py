"""Whether KV that came from elsewhere is what this worker computes itself, layer by layer. No engine, no network."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from common.errors import InvalidRequest
from common.kv_layout import KVLayout
from kv_transfer.wire_dtype import WireDtype

# How far apart two honest computations of one prompt may be, as a part of the layer's norm. Kernels, chunks and devices
# may differ, so each operation rounds differently, and layers pass that on. Measured on the default model's 30 layers
# between our CPU paths, with 37 and with 300 tokens: float32 1.5e-6, bfloat16 0.03. The rest is room for other
# hardware, deeper models, and a mixture of experts, where a near-tie may send a token to another expert. What is to be
# caught lies above: K and V swapped, heads permuted or positions shifted make about 1.4, and over 37 tokens a rotary
# base that is ten times as large 0.6 of K, one twice as large 0.24. A scale off by 1 % shows in float32 alone.
TOLERANCES = {"float32": 1e-3, "float16": 0.03, "bfloat16": 0.12}


def tolerance(layout: KVLayout, source_dtype: str, wire_dtype: WireDtype) -> float:
    """Largest acceptable relative error of one layer's K or V, where one side computes in the layout's dtype and the
    other in source_dtype: the coarser one decides.

    A lossy encoding adds its own bound (kv_transfer/wire_dtype.py), which holds for every vector and so for the layer:
    int8 is off by at most amax / 254 per value, and amax ≤ |v|, so by sqrt(head_dim) / 254 of the vector's norm; fp8
    by 1/16 of each value. What is encoded is the sender's own computation: it is off by a part of that, not of ours.
    Raises: InvalidRequest for a dtype that no KV cache has.
    """
    if source_dtype not in TOLERANCES:
        raise InvalidRequest(f"source_dtype is {source_dtype!r}; it must be one of {sorted(TOLERANCES)}")
    computed = max(TOLERANCES[layout.dtype], TOLERANCES[source_dtype])
    encoded = {
        WireDtype.SAME: 0.0,
        WireDtype.INT8: sqrt(layout.head_dim) / 254,
        WireDtype.FP8: 1 / 16,
    }[wire_dtype]
    return computed + encoded * (1 + computed)


@dataclass(frozen=True)
class LayerError:
    layer: int
    part: str  # "K" or "V"
    error: float  # |received - local| / |local| over all tokens and heads; NaN or inf where either is

    def __str__(self) -> str:
        return f"layer {self.layer} {self.part} has a relative error of {self.error:.2g}"


@dataclass(frozen=True)
class Comparison:
    errors: list[LayerError]  # by layer, K before V
    tolerance: float

    @property
    def disagreeing(self) -> list[LayerError]:
        return [error for error in self.errors if not error.error <= self.tolerance]  # a NaN disagrees

    @property
    def detail(self) -> str:
        """For people: the first layer that disagrees, which is where to look; else the largest error."""
        if not self.disagreeing:
            largest = max(self.errors, key=lambda error: error.error)
            return f"{largest}, the largest; the tolerance is {self.tolerance:.2g}"
        return (
            f"{self.disagreeing[0]}, the tolerance is {self.tolerance:.2g}; "
            f"{len(self.disagreeing)} of {len(self.errors)} disagree"
        )


def compare_layer(layer: int, received: Tensor, local: Tensor) -> list[LayerError]:
    """Errors of K and V. Both tensors: [1, 2 (K, V), tokens, kv_heads, head_dim] in the cache's dtype."""
    theirs, ours = received[0].float().flatten(1), local[0].float().flatten(1)
    norms = ours.norm(dim=1).clamp(min=torch.finfo(torch.float32).tiny)
    errors = ((theirs - ours).norm(dim=1) / norms).tolist()
    return [LayerError(layer, part, error) for part, error in zip("KV", errors, strict=True)]
