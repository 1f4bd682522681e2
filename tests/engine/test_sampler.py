from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.sampling import SamplingParams
from engine.sampler import argmax_rows, gumbel_noise, sample

CPU = torch.device("cpu")


def logits_of(probabilities: list[float]) -> torch.Tensor:
    return torch.tensor(probabilities).log()


def draw(probabilities: list[float], num_draws: int, **options: float) -> torch.Tensor:
    """Frequencies over many positions of one seed."""
    params = [SamplingParams(max_tokens=1, seed=7, **options)] * num_draws  # type: ignore[arg-type]
    tokens = sample(logits_of(probabilities).repeat(num_draws, 1), params, list(range(num_draws)))
    return torch.bincount(tokens, minlength=len(probabilities)) / num_draws


def test_temperature_zero_takes_the_most_likely_token() -> None:
    logits = torch.randn(16, 100)
    greedy = sample(logits, [SamplingParams(max_tokens=1, temperature=0)] * 16, [0] * 16)
    assert torch.equal(greedy, logits.argmax(-1))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 9), st.sampled_from([64, 100, 640, 6400]), st.integers(2, 1000), st.booleans())
def test_argmax_is_the_first_of_the_highest_and_a_nan_is_higher_still(
    num_rows: int, vocab_size: int, num_values: int, has_nan: bool
) -> None:
    generator = torch.Generator().manual_seed(num_values)
    scores = torch.randint(num_values, (num_rows, vocab_size), generator=generator).float()
    scores[::2, vocab_size // 3 :: 50] = -torch.inf
    if has_nan:
        scores[::3, [vocab_size // 2, vocab_size - 1]] = torch.nan
    expected = [max(range(vocab_size), key=lambda i: (row[i] != row[i], row[i], -i)) for row in scores.tolist()]
    assert argmax_rows(scores).tolist() == expected


def test_frequencies_follow_the_softmax() -> None:
    probabilities = [0.5, 0.3, 0.15, 0.05]
    assert torch.allclose(draw(probabilities, 20_000), torch.tensor(probabilities), atol=0.015)


def test_temperature_sharpens_the_distribution() -> None:
    squared = torch.tensor([0.5, 0.3, 0.2]) ** 2
    assert torch.allclose(draw([0.5, 0.3, 0.2], 20_000, temperature=0.5), squared / squared.sum(), atol=0.015)


def test_top_k_keeps_the_k_most_likely_tokens() -> None:
    assert torch.allclose(draw([0.5, 0.3, 0.15, 0.05], 20_000, top_k=2), torch.tensor([0.625, 0.375, 0, 0]), atol=0.015)


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    assert torch.allclose(
        draw([0.5, 0.3, 0.15, 0.05], 20_000, top_p=0.6), torch.tensor([0.625, 0.375, 0, 0]), atol=0.015
    )
    assert draw([0.5, 0.3, 0.2], 500, top_p=0.01)[0] == 1


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**63 - 1), st.integers(0, 10_000), st.integers(1, 5), st.sampled_from([1.0, 0.7]))
def test_a_draw_depends_on_seed_and_position_alone_not_on_the_batch(
    seed: int, position: int, row: int, top_p: float
) -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(seed % 1000))
    mine = SamplingParams(max_tokens=1, seed=seed, top_p=top_p)
    others = SamplingParams(max_tokens=1, seed=1, temperature=0.3)
    alone = sample(logits[row : row + 1], [mine], [position])[0]
    params = [mine if index == row else others for index in range(6)]
    assert sample(logits, params, [position if index == row else index for index in range(6)])[row] == alone


def test_seeds_and_positions_draw_independent_noise() -> None:
    noise = gumbel_noise([1, 2, 3, 2**63 + 5], 50_000, CPU)
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.02)  # Euler's constant: the mean of a standard Gumbel
    assert noise.var(dim=-1).mean().item() == pytest.approx(torch.pi**2 / 6, abs=0.05)
    assert torch.corrcoef(noise).fill_diagonal_(0).abs().max() < 0.02
