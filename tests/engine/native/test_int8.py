"""Weights as int8 codes: the products of code * scale in float32, in every shape, and whole models of such weights."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from engine.native.kernels import NativeKernels
from engine.native.packing import WeightFormat

INT8 = WeightFormat.INT8
ROUNDING = 2**-8  # of a value stored as bfloat16, relative
SUMMING = 1e-5  # float32 sums in another order, of the largest


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def stands_for(weight: Tensor) -> Tensor:
    """What is left of a weight [n, k]: whole multiples, up to 127, of a scale that each row has for itself."""
    scale = weight.float().abs().amax(dim=1, keepdim=True) / 127
    return (weight.float() / scale).round() * scale


def assert_close(actual: Tensor, expected: Tensor) -> None:
    rounding = ROUNDING if actual.dtype == torch.bfloat16 else 0
    largest = expected.abs().max().item()
    torch.testing.assert_close(actual.float(), expected, rtol=rounding, atol=SUMMING * largest + 1e-6)


shapes = {"m": st.integers(1, 70), "n": st.integers(1, 200), "half_k": st.integers(1, 300), "has_bias": st.booleans()}


@given(**shapes, has_residual=st.booleans())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_linear_equals_the_float32_product_of_what_the_codes_stand_for(
    one_thread: NativeKernels, m: int, n: int, half_k: int, has_bias: bool, has_residual: bool
) -> None:
    x, weight = random(m, m, 2 * half_k), random(n, n, 2 * half_k)
    bias = random(3, n) if has_bias else None
    residual = random(4, m, n) if has_residual else None
    expected = F.linear(x.float(), stands_for(weight), None if bias is None else bias.float())
    packed = one_thread.pack_linear(weight, bias, INT8)
    assert_close(one_thread.linear_float32(x, packed), expected)
    if residual is not None:
        expected = expected + residual.float()
    assert_close(one_thread.linear(x, packed, residual), expected)


@given(**shapes)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_swiglu_equals_silu_of_the_gate_times_up(
    one_thread: NativeKernels, m: int, n: int, half_k: int, has_bias: bool
) -> None:
    x, weight = random(m, m, 2 * half_k), random(n, 2 * n, 2 * half_k)
    bias = random(3, 2 * n) if has_bias else None
    gate, up = F.linear(x.float(), stands_for(weight), None if bias is None else bias.float()).chunk(2, dim=-1)
    assert_close(one_thread.swiglu(x, one_thread.pack_swiglu(weight, bias, INT8)), F.silu(gate) * up)


@pytest.mark.parametrize("m", [1, 5, 200])
def test_sums_longer_than_a_cache_block_are_taken_up_again(one_thread: NativeKernels, m: int) -> None:
    x, weight = random(1, m, 5002), random(2, 70, 5002)
    packed = one_thread.pack_linear(weight, weights=INT8)
    assert_close(one_thread.linear_float32(x, packed), x.float() @ stands_for(weight).T)


@pytest.mark.parametrize("m", [1, 256])
def test_every_code_stands_for_itself_in_every_column(two_threads: NativeKernels, m: int) -> None:
    """One-hot rows pick out single weights; each row of the weight holds all codes, in an order of its own."""
    codes = torch.cat((torch.arange(-127, 128), torch.zeros(1))).float()
    weight = torch.stack([codes.roll(shift) * 2.0**-shift for shift in range(100)])
    packed = two_threads.pack_linear(weight.bfloat16(), weights=INT8)
    one_hot = torch.eye(256).bfloat16()
    found = torch.cat([two_threads.linear_float32(rows, packed) for rows in one_hot.split(m)])
    assert torch.equal(found, weight.T)


def test_a_weight_is_off_by_at_most_half_a_step_of_its_row(one_thread: NativeKernels) -> None:
    weight = random(1, 130, 64) * torch.logspace(-20, 20, 130)[:, None].bfloat16()
    packed = one_thread.pack_linear(weight, weights=INT8)
    found = one_thread.linear_float32(torch.eye(64).bfloat16(), packed).T
    steps = weight.float().abs().amax(dim=1, keepdim=True) / 127
    assert ((found - weight.float()).abs() <= 0.5001 * steps).all()


def test_a_row_of_zeros_stays_zero(one_thread: NativeKernels) -> None:
    weight = random(1, 70, 34)
    weight[[0, 63, 69]] = 0
    y = one_thread.linear_float32(random(2, 9, 34), one_thread.pack_linear(weight, weights=INT8))
    assert y.isfinite().all()
    assert (y == 0).all(dim=0).nonzero().flatten().tolist() == [0, 63, 69]


def test_codes_take_half_the_memory(one_thread: NativeKernels) -> None:
    weight = random(1, 128, 64)
    in_bf16, in_int8 = (one_thread.pack_linear(weight, weights=weights).weight.nbytes for weights in WeightFormat)
    assert (in_bf16, in_int8) == (128 * 64 * 2, 128 * 64)


@pytest.mark.parametrize("n", [576, 100])
@pytest.mark.parametrize("k", [576, 3000])
def test_a_rows_result_does_not_depend_on_its_batch_nor_on_the_threads(
    one_thread: NativeKernels, two_threads: NativeKernels, n: int, k: int
) -> None:
    x, weight = random(1, 400, k), random(2, 2 * n, k)
    packed = one_thread.pack_linear(weight, weights=INT8)
    packed_swiglu = one_thread.pack_swiglu(weight, weights=INT8)
    whole, whole_swiglu = one_thread.linear_float32(x, packed), one_thread.swiglu(x, packed_swiglu)
    assert torch.equal(whole, two_threads.linear_float32(x, packed))
    assert torch.equal(whole_swiglu, two_threads.swiglu(x, packed_swiglu))
    for m in (*range(1, 14), 70, 193):
        assert torch.equal(one_thread.linear_float32(x[:m], packed), whole[:m])
        assert torch.equal(two_threads.swiglu(x[:m], packed_swiglu), whole_swiglu[:m])
