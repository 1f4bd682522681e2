"""What the self-test of a pair tolerates, and what it does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from common.errors import InvalidRequest
from common.kv_layout import KVLayout
from decode_worker.kv_comparison import Comparison, compare_layer, tolerance
from kv_transfer.codec import DTYPES
from kv_transfer.wire_dtype import ENCODINGS, WireDtype

Fault = Callable[[Tensor], Tensor]  # of [layers, 2 (K, V), tokens, kv_heads, head_dim]

FAULTS: dict[str, Fault] = {
    "K and V swapped": lambda kv: kv.flip(1),
    "two heads exchanged": lambda kv: kv[:, :, :, [1, 0, 2, 3]],
    "one position too late": lambda kv: kv.roll(1, dims=2),
    "the last block is another's": lambda kv: torch.cat([kv[:, :, :32], kv[:, :, :5]], dim=2),
    "half of each head exchanged": lambda kv: kv.roll(kv.shape[4] // 2, dims=4),
    "a zeroed V": lambda kv: torch.stack([kv[:, 0], kv[:, 1] * 0], dim=1),
    "a NaN": lambda kv: kv.index_fill(2, torch.tensor([3]), torch.nan),
    "an infinity": lambda kv: kv.index_fill(2, torch.tensor([3]), torch.inf),
}


def layout(dtype: str, head_dim: int = 64) -> KVLayout:
    return KVLayout("f00d", 3, 4, head_dim, dtype, "theta=10000")


def random_kv(dtype: str, head_dim: int = 64) -> Tensor:
    return torch.randn(3, 2, 37, 4, head_dim, generator=torch.Generator().manual_seed(7)).to(DTYPES[dtype])


def sent(kv: Tensor, wire_dtype: WireDtype) -> Tensor:
    encoding = ENCODINGS[wire_dtype]
    return encoding.decode(encoding.encode(kv.contiguous()), kv.shape, kv.dtype)


def compared(received: Tensor, local: Tensor, tolerated: float) -> Comparison:
    errors = [compare_layer(n, received[n : n + 1], local[n : n + 1]) for n in range(local.shape[0])]
    return Comparison([error for layer in errors for error in layer], tolerated)


@pytest.mark.parametrize("wire_dtype", list(WireDtype))
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_encoding_stays_within_its_tolerance(dtype: str, head_dim: int, wire_dtype: WireDtype) -> None:
    kv = random_kv(dtype, head_dim)
    kv[..., 5] *= 40  # an outlier channel, as K has: the worst for one scale per vector
    result = compared(sent(kv, wire_dtype), kv, tolerance(layout(dtype, head_dim), dtype, wire_dtype))
    assert result.disagreeing == []
    assert "the largest" in result.detail


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("wire_dtype", list(WireDtype))
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_every_fault_is_above_every_tolerance(dtype: str, wire_dtype: WireDtype, fault: str) -> None:
    kv = random_kv(dtype)
    result = compared(FAULTS[fault](sent(kv, wire_dtype)), kv, tolerance(layout(dtype), dtype, wire_dtype))
    assert {error.layer for error in result.disagreeing} == {0, 1, 2}


def test_a_scale_off_by_one_percent_shows_in_float32() -> None:
    kv = random_kv("float32")
    assert len(compared(kv * 1.01, kv, tolerance(layout("float32"), "float32", WireDtype.SAME)).disagreeing) == 6


def test_the_first_layer_that_disagrees_is_named_with_its_part_and_both_numbers() -> None:
    kv = random_kv("float32")
    wrong = kv.clone()
    wrong[1:, 1] *= 2
    result = compared(wrong, kv, 0.001)
    assert [(error.layer, error.part) for error in result.disagreeing] == [(1, "V"), (2, "V")]
    assert result.detail == ("layer 1 V has a relative error of 1, the tolerance is 0.001; 2 of 6 disagree")


def test_layers_that_are_all_zeros_agree_and_differ_from_all_others() -> None:
    zeros = torch.zeros(1, 2, 4, 2, 8)
    assert compared(zeros, zeros, 0.001).disagreeing == []
    assert len(compared(zeros + 1, zeros, 0.001).disagreeing) == 2


def test_the_coarser_dtype_of_the_two_sides_decides() -> None:
    coarse = tolerance(layout("bfloat16"), "bfloat16", WireDtype.INT8)
    assert tolerance(layout("float32"), "bfloat16", WireDtype.INT8) == coarse
    assert tolerance(layout("bfloat16"), "float32", WireDtype.INT8) == coarse
    with pytest.raises(InvalidRequest, match="source_dtype is 'int4'"):
        tolerance(layout("float32"), "int4", WireDtype.SAME)
