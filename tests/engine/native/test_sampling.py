"""The native sampler draws what engine/sampler.py draws, token for token."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.sampling import SamplingParams
from engine.allowed_tokens import FEW
from engine.native.kernels import NativeKernels
from engine.native.sampling import NativeSampler
from engine.sampler import sample

params = st.builds(
    SamplingParams,
    max_tokens=st.just(1),
    seed=st.integers(0, 2**63 - 1),
    temperature=st.one_of(st.just(0.0), st.just(1.0), st.floats(1e-3, 2.0), st.sampled_from([5e-324, 1e-300, 1e-30])),
    top_p=st.one_of(st.just(1.0), st.just(0.9), st.floats(1e-6, 1.0), st.sampled_from([5e-324, math.nextafter(1, 0)])),
    top_k=st.sampled_from([0, 0, 1, 2, 3, 15, 16, 17, 50, 2000, 2**70 + 3]),
)


@st.composite
def rows_of_logits(draw: st.DrawFn) -> Tensor:
    """Narrow and wide, with many equals or none, of sizes on and around whole vectors, some with tokens ruled out."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    num_rows, vocab_size = draw(st.integers(1, 5)), draw(st.sampled_from([1, 2, 15, 16, 17, 100, 640, 1031, 5000]))
    logits = torch.randn(num_rows, vocab_size, generator=generator) * draw(st.sampled_from([0.0, 0.1, 2.0, 30.0, 1e30]))
    if draw(st.booleans()):
        logits = logits.round()
    if draw(st.booleans()):
        logits[:, :: draw(st.integers(1, 20))] = draw(st.sampled_from([-torch.inf, -1e9, -0.0]))
    return logits


@pytest.fixture(scope="module")
def native(two_threads: NativeKernels) -> NativeSampler:
    return NativeSampler(two_threads)


@settings(max_examples=400, deadline=None)
@given(rows_of_logits(), st.lists(params, min_size=5, max_size=5), st.integers(0, 2**40))
def test_tokens_are_those_of_the_torch_sampler(
    native: NativeSampler, logits: Tensor, wanted: list[SamplingParams], position: int
) -> None:
    wanted, positions = wanted[: len(logits)], list(range(position, position + len(logits)))
    assert native(logits, wanted, positions).tolist() == sample(logits, wanted, positions).tolist()


@pytest.mark.parametrize("options", [{}, {"top_k": 50}, {"top_p": 0.9}, {"top_p": 0.3, "temperature": 0.6}])
def test_many_draws_from_a_whole_vocabulary_agree(native: NativeSampler, options: dict[str, float]) -> None:
    """Narrow logits need more tokens than the torch sampler tries first."""
    generator = torch.Generator().manual_seed(1)
    for scale in (1.0, 5.0):
        logits = torch.randn(16, 49152, generator=generator) * scale
        for seed in range(8):
            wanted = [SamplingParams(max_tokens=1, seed=seed, **options)] * 16  # type: ignore[arg-type]
            assert torch.equal(native(logits, wanted, range(16)), sample(logits, wanted, range(16)))
    assert (logits.new_ones(1, 49152).softmax(-1).sort().values[:, :FEW].sum() < 0.3).all()


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.5}, {"temperature": 0.0}])
def test_rows_that_hold_no_sensible_number_give_their_argmax(native: NativeSampler, options: dict[str, float]) -> None:
    logits = torch.randn(5, 100)
    logits[0, 70:72] = torch.nan
    logits[1, 33] = torch.inf
    logits[2, :] = -torch.inf
    logits[3, [5, 40]] = torch.tensor([torch.inf, torch.nan])
    wanted = [SamplingParams(max_tokens=1, **options)] * 5  # type: ignore[arg-type]
    found = native(logits, wanted, range(5))
    assert found[:4].tolist() == [70, 33, 0, 40]
    assert torch.equal(found, sample(logits, wanted, range(5)))


def test_no_rows_are_no_tokens(native: NativeSampler) -> None:
    """A step of chunks alone samples nothing."""
    assert native(torch.empty(0, 100), [], []).tolist() == []
