"""Encodings of pieces: the size is known beforehand, the error stays within its bound, no damage looks like data."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kv_transfer.wire_dtype import ENCODINGS, WireDtype

LOSSY = [WireDtype.INT8, WireDtype.FP8]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

shapes = st.tuples(st.integers(1, 3), st.just(2), st.integers(1, 4), st.integers(1, 3), st.integers(1, 9))


@st.composite
def pieces(draw: st.DrawFn) -> Tensor:
    """Finite values of any size, zeros and subnormals among them; each vector in a magnitude of its own or in all."""
    shape, dtype = draw(shapes), draw(st.sampled_from(DTYPES))
    num_vectors, head_dim = math.prod(shape[:-1]), shape[-1]
    values: list[list[float]] = []
    for _ in range(num_vectors):
        bound = draw(st.sampled_from([0.0, 2.0**-149, 2.0**-126, 2.0**-20, 1.0, 300.0, 65504.0, 2.0**127]))
        floats = st.floats(-bound, bound, width=32)
        values.append(draw(st.lists(floats, min_size=head_dim, max_size=head_dim)))
    limit = torch.finfo(dtype)
    return torch.tensor(values).clamp(limit.min, limit.max).to(dtype).view(shape)


def there_and_back(kind: WireDtype, data: Tensor) -> Tensor:
    encoding = ENCODINGS[kind]
    flat = encoding.encode(data)
    assert flat.dtype == torch.uint8
    assert flat.shape == (encoding.num_bytes(data.shape, data.dtype),)
    return encoding.decode(flat, data.shape, data.dtype)


def stated_bound(kind: WireDtype, data: Tensor) -> Tensor:
    """What the module promises for each value, before rounding to the dtype; in float64."""
    exact = data.double()
    amax = exact.abs().amax(dim=-1, keepdim=True)
    bound = amax / 254 if kind == WireDtype.INT8 else torch.maximum(exact.abs() / 16, amax / 448 / 1024)
    return (bound * (1 + 1e-4)).clamp(min=2.0**-127).expand_as(exact)


def rounding(data: Tensor) -> Tensor:
    """Half a unit in the last place of values of this size, in float64."""
    limit = torch.finfo(data.dtype)
    return data.double().abs().clamp(min=limit.tiny) * limit.eps / 2


@pytest.mark.parametrize("kind", LOSSY)
@given(data=pieces())
def test_the_error_stays_within_the_stated_bound(kind: WireDtype, data: Tensor) -> None:
    decoded = there_and_back(kind, data)
    assert decoded.dtype == data.dtype
    assert decoded.shape == data.shape
    error = (decoded.double() - data.double()).abs()
    assert (error <= stated_bound(kind, data) + rounding(decoded)).all()


@pytest.mark.parametrize("kind", LOSSY)
@given(data=pieces())
def test_zeros_stay_zeros_and_no_sign_turns(kind: WireDtype, data: Tensor) -> None:
    decoded = there_and_back(kind, data)
    assert (decoded[data == 0] == 0).all()
    assert (decoded.sign() * data.sign() >= 0).all()


@pytest.mark.parametrize("kind", LOSSY)
@given(data=pieces(), places=st.data())
def test_a_vector_with_a_nan_or_an_infinity_becomes_nan_and_its_neighbours_do_not(
    kind: WireDtype, data: Tensor, places: st.DataObject
) -> None:
    vectors = data.view(-1, data.shape[-1])
    hit = places.draw(st.integers(0, len(vectors) - 1))
    vectors[hit, places.draw(st.integers(0, data.shape[-1] - 1))] = places.draw(
        st.sampled_from([math.nan, math.inf, -math.inf])
    )
    is_nan = there_and_back(kind, data).isnan().view(-1, data.shape[-1])
    assert is_nan[hit].all()
    assert is_nan.sum() == data.shape[-1]


@given(data=pieces())
def test_same_is_the_bits_themselves_without_a_copy(data: Tensor) -> None:
    data.view(-1)[0] = math.nan
    decoded = there_and_back(WireDtype.SAME, data)
    assert torch.equal(decoded.view(torch.uint8), data.view(torch.uint8))
    assert decoded.data_ptr() == data.data_ptr()


@pytest.mark.parametrize("kind", LOSSY)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_values_of_every_dtype_neither_overflow_nor_wrap(kind: WireDtype, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    data = torch.tensor([largest, -largest, largest / 3, 0.0], dtype=dtype).expand(1, 2, 1, 1, 4).contiguous()
    decoded = there_and_back(kind, data)
    assert decoded.isfinite().all()
    assert torch.allclose(decoded[..., :2].double(), data[..., :2].double(), rtol=2 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("kind", LOSSY)
def test_a_piece_of_several_chunks_decodes_like_each_of_its_vectors_alone(kind: WireDtype) -> None:
    data = torch.randn(3, 2, 1100, 2, 96, dtype=torch.bfloat16)
    decoded = there_and_back(kind, data)
    for layer, side, token, head in ((0, 0, 0, 0), (1, 0, 531, 1), (2, 1, 1099, 1)):
        alone = data[layer, side, token, head].clone().view(1, 1, 1, 1, 96)
        assert torch.equal(there_and_back(kind, alone).view(-1), decoded[layer, side, token, head])
    assert ((decoded.double() - data.double()).abs() <= stated_bound(kind, data) + rounding(decoded)).all()


@pytest.mark.parametrize("kind", LOSSY)
def test_a_payload_may_begin_anywhere_in_a_buffer(kind: WireDtype) -> None:
    data = torch.randn(1, 2, 3, 1, 5)
    flat = ENCODINGS[kind].encode(data)
    buffer = torch.zeros(flat.numel() + 8, dtype=torch.uint8)
    for offset in range(8):
        place = buffer[offset : offset + flat.numel()]
        place.copy_(flat)
        assert torch.equal(ENCODINGS[kind].decode(place, data.shape, data.dtype), there_and_back(kind, data))


@pytest.mark.parametrize("kind", WireDtype)
@given(shapes, st.sampled_from(DTYPES))
def test_the_size_is_proportional_to_layers_tokens_and_heads(
    kind: WireDtype, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    layers, _, tokens, heads, head_dim = shape
    one = ENCODINGS[kind].num_bytes((1, 2, 1, 1, head_dim), dtype)
    assert ENCODINGS[kind].num_bytes(shape, dtype) == layers * tokens * heads * one


@pytest.mark.parametrize("kind", WireDtype)
def test_no_tokens_take_no_bytes(kind: WireDtype) -> None:
    assert there_and_back(kind, torch.empty(3, 2, 0, 2, 8)).shape == (3, 2, 0, 2, 8)


def test_a_code_of_fp8_means_what_torch_says() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(torch.float8_e4m3fn).float()
    codes, expected = codes[~expected.isnan()], expected[~expected.isnan()]
    scales = torch.ones(len(codes)).view(torch.uint8)
    decoded = ENCODINGS[WireDtype.FP8].decode(torch.cat([scales, codes]), (1, 1, len(codes), 1, 1), torch.float32)
    assert len(codes) == 254
    assert torch.equal(decoded.view(-1), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", LOSSY)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_keeps_the_bound_and_either_side_reads_the_other(kind: WireDtype, dtype: torch.dtype) -> None:
    data = torch.randn(3, 2, 700, 4, 128).mul_(10).to(dtype)
    encoding, bound = ENCODINGS[kind], stated_bound(kind, data)
    from_cpu = encoding.decode(encoding.encode(data).cuda(), data.shape, dtype).cpu()
    from_gpu = encoding.decode(encoding.encode(data.cuda()).cpu(), data.shape, dtype)
    for decoded in (from_cpu, from_gpu):
        assert ((decoded.double() - data.double()).abs() <= bound + rounding(decoded)).all()
