"""The sampler's noise: a hash of (seed, position, token id), with integers that are the same on every device."""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 2**64 - 1
# SplitMix64 (Steele, Lea, Flood 2014): its increment and its two multipliers.
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def gumbel_noise(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise, a pure function of (key, token id): [num_rows, num_tokens] float64, finite.

    keys: [num_rows, 1] int64, of noise_key. token_ids: [1 or num_rows, num_tokens] int64.
    """
    bits = token_ids * _signed(_GOLDEN) + keys
    shifted = torch.empty_like(bits)  # on a CPU most of the time would go into fresh memory
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):  # as `_mix`: int64 products wrap as unsigned ones do
        bits ^= _shift_right(bits, shift, shifted)
        bits *= _signed(factor)
    bits ^= _shift_right(bits, 31, shifted)
    # 52 bits: a half more is still an exact float64, so that u is neither 0 nor 1
    uniform = _shift_right(bits, 12, shifted).to(torch.float64).add_(0.5).mul_(2.0**-52)
    return uniform.log_().neg_().log_().neg_()


def noise_key(seed: int, position: int) -> int:
    """As an int64."""
    return _signed(_mix(_mix(seed + _GOLDEN) ^ position))


def _mix(x: int) -> int:
    x &= _MASK
    x = ((x ^ (x >> 30)) * _MIX_1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX_2) & _MASK
    return x ^ (x >> 31)


def _shift_right(x: Tensor, bits: int, out: Tensor) -> Tensor:
    """Zeros come in, where torch brings in copies of the sign."""
    torch.bitwise_right_shift(x, bits, out=out)
    out &= (1 << (64 - bits)) - 1
    return out


def _signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x
