"""Linear kernels against float32 products of the same bfloat16 numbers, over all row counts and odd shapes."""

from __future__ import annotations

import pytest
import torch
from engine.native.kernels import NativeKernels, supports_linear
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

ROUNDING = 2**-8  # of a value stored as bfloat16, relative
SUMMING = 1e-4  # float32 sums in another order


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def assert_close(actual: Tensor, expected: Tensor) -> None:
    rounding = ROUNDING if actual.dtype == torch.bfloat16 else SUMMING
    torch.testing.assert_close(
        actual.float(), expected, rtol=rounding, atol=SUMMING * expected.abs().max().item() + 1e-6
    )


shapes = {"m": st.integers(1, 70), "n": st.integers(1, 200), "half_k": st.integers(1, 300), "has_bias": st.booleans()}


@given(**shapes, has_residual=st.booleans())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_linear_equals_the_float32_product(
    one_thread: NativeKernels, m: int, n: int, half_k: int, has_bias: bool, has_residual: bool
) -> None:
    x, weight = random(m, m, 2 * half_k), random(n, n, 2 * half_k)
    bias = random(3, n) if has_bias else None
    residual = random(4, m, n) if has_residual else None
    expected = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    packed = one_thread.pack_linear(weight, bias)
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
    gate, up = F.linear(x.float(), weight.float(), None if bias is None else bias.float()).chunk(2, dim=-1)
    assert_close(one_thread.swiglu(x, one_thread.pack_swiglu(weight, bias)), F.silu(gate) * up)


def test_sums_longer_than_a_cache_block_are_taken_up_again(one_thread: NativeKernels) -> None:
    x, weight = random(1, 200, 5002), random(2, 70, 5002)
    assert_close(one_thread.linear_float32(x, one_thread.pack_linear(weight)), x.float() @ weight.float().T)


def test_swiglu_of_large_gates_neither_overflows_nor_becomes_nan(one_thread: NativeKernels) -> None:
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).bfloat16()  # gate = x[0], up = x[1]
    x = torch.tensor([[-300.0, 2.0], [-1e30, 1.0], [300.0, 2.0], [0.0, 5.0]]).bfloat16()
    y = one_thread.swiglu(x, one_thread.pack_swiglu(weight))
    assert y.flatten().abs().tolist() == [0.0, 0.0, x[2, 0].item() * 2, 0.0]


def test_the_residual_may_be_the_rows_of_a_larger_tensor(one_thread: NativeKernels) -> None:
    x, weight, wide = random(1, 5, 64), random(2, 96, 64), random(3, 5, 300)
    packed = one_thread.pack_linear(weight)
    assert torch.equal(
        one_thread.linear(x, packed, wide[:, 10:106]), one_thread.linear(x, packed, wide[:, 10:106].contiguous())
    )
    assert torch.equal(
        one_thread.linear(wide[:, 20:84], packed), one_thread.linear(wide[:, 20:84].contiguous(), packed)
    )


@pytest.mark.parametrize("n", [576, 100])
def test_a_rows_result_does_not_depend_on_its_batch_nor_on_the_threads(
    one_thread: NativeKernels, two_threads: NativeKernels, n: int
) -> None:
    x, weight = random(1, 400, 576), random(2, 2 * n, 576)
    packed, packed_swiglu = one_thread.pack_linear(weight), one_thread.pack_swiglu(weight)
    whole, whole_swiglu = one_thread.linear_float32(x, packed), one_thread.swiglu(x, packed_swiglu)
    assert torch.equal(whole, two_threads.linear_float32(x, packed))
    assert torch.equal(whole_swiglu, two_threads.swiglu(x, packed_swiglu))
    for m in (*range(1, 14), 70, 193):
        assert torch.equal(one_thread.linear_float32(x[:m], packed), whole[:m])
        assert torch.equal(two_threads.swiglu(x[:m], packed_swiglu), whole_swiglu[:m])


def test_a_weight_of_odd_width_is_refused(one_thread: NativeKernels) -> None:
    assert not supports_linear(33)
    with pytest.raises(AssertionError):
        one_thread.pack_linear(random(1, 8, 33))
