"""How a piece's values are written on the wire: as they are, or in one byte each for links slower than the memory.

A lossy encoding gives every vector of head_dim values (one layer, K or V, token and head) a float32 scale of its own:

    flat      [scales: 4 × vectors bytes][codes: head_dim × vectors bytes]        vectors in the piece's own order
    decoded   scale × code, where scale = amax / largest code, amax = max |x| of the vector

One scale for more values would let a single outlier flatten its neighbours, and a 16-bit scale lacks float32's range or
half of a code's precision to save 1.5 % at head_dim 128; so 132 bytes stand for 256 of bfloat16.

How far a decoded value y may be from x, before y is rounded to the piece's dtype:

    int8      amax / 254
    fp8       |x| / 16, but not below amax / 448 / 1024 (half the step of e4m3's subnormals)
    both      may add 1e-4 of that for float32's own rounding, and never promise less than 2**-127

A zero vector comes back as zeros. A vector with a NaN or an infinity comes back as NaN throughout, never as numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import prod
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

SCALE_BYTES = 4

# Values that are encoded or decoded at a time: their float32 copies stay in a CPU's cache; encoding is twice as fast.
_CHUNK_VALUES = 512 * 1024
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # its reciprocal is finite; 0 stands for whatever is smaller


class WireDtype(StrEnum):
    SAME = "same"
    INT8 = "int8"
    FP8 = "fp8"  # float8_e4m3fn


class Encoding(Protocol):
    """Of pieces: contiguous [layers, 2 (K, V), tokens, heads, head_dim] in float32, bfloat16 or float16."""

    def num_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Of such a piece when encoded, exactly; proportional to layers × tokens × heads."""

    def encode(self, data: Tensor) -> Tensor:
        """The piece as [num_bytes] uint8 on its own device."""

    def decode(self, flat: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The piece again. `flat` must have num_bytes(shape, dtype) bytes; check that first."""


@dataclass(frozen=True)
class Unchanged:
    """The values as they are. Both ways share the memory that they are given."""

    def num_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        return prod(shape) * dtype.itemsize

    def encode(self, data: Tensor) -> Tensor:
        return data.view(-1).view(torch.uint8)

    def decode(self, flat: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return flat.view(dtype).view(*shape)


@dataclass(frozen=True)
class Codes:
    """A one-byte number format."""

    largest: float
    of: Callable[[Tensor], Tensor]  # float32 within ± largest → nearest codes; may overwrite its argument
    values: Callable[[Tensor], Tensor]  # codes, as uint8 → fresh float32


@dataclass(frozen=True)
class Scaled:
    """A scale and codes per vector. Both ways return memory of their own."""

    codes: Codes

    def num_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        *vectors, head_dim = shape
        return prod(vectors) * (SCALE_BYTES + head_dim)

    def encode(self, data: Tensor) -> Tensor:
        vectors = data.view(-1, data.shape[-1])
        flat = torch.empty(self.num_bytes(data.shape, data.dtype), dtype=torch.uint8, device=data.device)
        scales, codes = _sections(flat, *vectors.shape)
        for chunk in _chunks(*vectors.shape):
            values = vectors[chunk].to(torch.float32, copy=True)
            scale = self._scale(values.abs().amax(dim=1, keepdim=True))
            scales[chunk] = scale.view(torch.uint8)
            codes[chunk] = self.codes.of(values.mul_(scale.reciprocal())).view(torch.uint8)
        return flat

    def decode(self, flat: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        data = torch.empty(*shape, dtype=dtype, device=flat.device)
        vectors = data.view(-1, data.shape[-1])
        scales, codes = _sections(flat, *vectors.shape)
        for chunk in _chunks(*vectors.shape):
            scale = scales[chunk].clone().view(torch.float32)  # the copy is aligned, wherever in a buffer `flat` begins
            vectors[chunk] = self.codes.values(codes[chunk]).mul_(scale)
        return data

    def _scale(self, amax: Tensor) -> Tensor:
        ceiling = torch.finfo(torch.float32).max / self.codes.largest * (1 - 2**-23)  # decoding must not overflow
        scale = (amax / self.codes.largest).clamp(_SMALLEST_SCALE, ceiling)
        return torch.where(amax.isfinite(), scale, torch.nan)


def _sections(flat: Tensor, num_vectors: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Scales [num_vectors, 4] and codes [num_vectors, head_dim], both uint8 in the memory of `flat`."""
    codes_start = SCALE_BYTES * num_vectors
    return flat[:codes_start].view(num_vectors, SCALE_BYTES), flat[codes_start:].view(num_vectors, head_dim)


def _chunks(num_vectors: int, head_dim: int) -> list[slice]:
    step = max(1, _CHUNK_VALUES // head_dim)
    return [slice(start, start + step) for start in range(0, num_vectors, step)]


def _to_int8(values: Tensor) -> Tensor:
    return values.round_().to(torch.int8)


def _from_int8(codes: Tensor) -> Tensor:
    return codes.view(torch.int8).float()


def _to_fp8(values: Tensor) -> Tensor:
    return values.to(torch.float8_e4m3fn)


def _from_fp8(codes: Tensor) -> Tensor:
    """By way of float16, since torch's own conversion is ten times as slow on a CPU.

    e4m3's bits, moved into float16's sign, lower exponent and upper mantissa, mean 2**(7 - 15) of what they meant
    (7 and 15 are the exponents' biases), subnormals included. Its NaN becomes a number, but encoding writes one only
    where the scale is NaN too.
    """
    bits = codes.view(torch.int8).to(torch.int16)  # extends the sign to the left
    halves = bits.bitwise_left_shift_(7).bitwise_and_(~0x407F)  # clears the exponent's upper bit
    return halves.view(torch.float16).float().mul_(2.0**8)


ENCODINGS: Mapping[WireDtype, Encoding] = MappingProxyType(
    {
        WireDtype.SAME: Unchanged(),
        WireDtype.INT8: Scaled(Codes(127.0, _to_int8, _from_int8)),
        WireDtype.FP8: Scaled(Codes(448.0, _to_fp8, _from_fp8)),
    }
)
