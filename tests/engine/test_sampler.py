from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.sampling import SamplingParams
from engine import allowed_tokens
from engine.allowed_tokens import Wishes, restricted_tokens
from engine.noise import gumbel_noise, noise_key
from engine.sampler import argmax_rows, sample

CPU = torch.device("cpu")


def logits_of(probabilities: list[float]) -> Tensor:
    return torch.tensor(probabilities).log()


def draw(logits: Tensor, num_draws: int, **options: float) -> Tensor:
    """How often each token comes, over many positions of one seed."""
    params = [SamplingParams(max_tokens=1, seed=7, **options)] * num_draws  # type: ignore[arg-type]
    tokens = sample(logits.repeat(num_draws, 1), params, list(range(num_draws)))
    return torch.bincount(tokens, minlength=len(logits))


def assert_follows(counts: Tensor, probabilities: Tensor) -> None:
    """Pearson's chi-square, with room for six standard deviations; what cannot come has not come."""
    possible = probabilities > 0
    expected = probabilities[possible].double() * counts.sum()
    assert counts[~possible].sum() == 0
    assert expected.min() > 5, "too few draws for a chi-square"
    degrees = len(expected) - 1
    statistic = ((counts[possible] - expected) ** 2 / expected).sum().item()
    assert abs(statistic - degrees) < 6 * math.sqrt(2 * degrees)


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


# ---------------------------------------------------------------- distributions


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(2))
    assert_follows(draw(logits, 40_000, temperature=temperature), (logits.double() / temperature).softmax(-1))


def test_frequencies_follow_the_softmax_over_a_whole_vocabulary() -> None:
    """Tokens in 64 groups, each of rare ones: noise that repeated over ids would show."""
    logits = torch.randn(8192, generator=torch.Generator().manual_seed(3))
    counts = draw(logits, 6_000)
    assert_follows(counts.view(128, 64).sum(0), logits.double().softmax(-1).view(128, 64).sum(0))
    assert_follows(counts.view(64, 128).sum(1), logits.double().softmax(-1).view(64, 128).sum(1))


def test_top_k_keeps_the_k_most_likely_tokens() -> None:
    counts = draw(logits_of([0.05, 0.3, 0.15, 0.5]), 20_000, top_k=2)
    assert_follows(counts, torch.tensor([0, 0.375, 0, 0.625]))


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    assert_follows(draw(logits_of([0.15, 0.3, 0.5, 0.05]), 20_000, top_p=0.6), torch.tensor([0, 0.375, 0.625, 0]))
    assert draw(logits_of([0.5, 0.3, 0.2]), 500, top_p=0.01)[0] == 500


def test_top_p_is_of_what_top_k_leaves() -> None:
    """Of 0.4 and 0.3, alone 0.57 and 0.43, the first reaches 0.5; of all it would not."""
    assert draw(logits_of([0.4, 0.3, 0.2, 0.1]), 500, top_k=2, top_p=0.5).tolist() == [500, 0, 0, 0]
    assert_follows(draw(logits_of([0.4, 0.3, 0.2, 0.1]), 5_000, top_p=0.5), torch.tensor([4 / 7, 3 / 7, 0, 0]))


def test_of_equal_tokens_the_first_are_allowed() -> None:
    """Exactly so many, though sums of floats would say now this and now that."""
    counts = draw(torch.zeros(8), 8_000, top_p=0.5)
    assert_follows(counts, torch.tensor([0.25] * 4 + [0.0] * 4))
    assert_follows(draw(torch.tensor([1.0, 2, 2, 0, 2, 2]), 6_000, top_k=3), torch.tensor([0, 1, 1, 0, 1, 0]) / 3)
    assert_follows(draw(torch.tensor([-0.0, 0.0, -0.0]), 6_000, top_k=2), torch.tensor([0.5, 0.5, 0]))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=12), st.integers(0, 13), st.integers(1, 99), st.integers(1, 4))
def test_the_allowed_tokens_are_those_of_exact_arithmetic(
    halvings: list[int], top_k: int, percent: int, few: int
) -> None:
    """Probabilities that are powers of two, as fractions. `few`: how many a CPU ranks at first."""
    ranked = sorted(range(len(halvings)), key=lambda token: (halvings[token], token))[: top_k or None]
    weights = [Fraction(1, 2 ** halvings[token]) for token in ranked]
    target = Fraction(percent, 100) * sum(weights)
    expected = {token for index, token in enumerate(ranked) if sum(weights[:index]) < target}
    logits = torch.tensor([halvings], dtype=torch.float32) * -1.0
    params = SamplingParams(1, temperature=1 / math.log(2), top_k=top_k, top_p=percent / 100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(allowed_tokens, "FEW", few)
        found = restricted_tokens(logits, Wishes.of([params], len(halvings), CPU))
    chosen = {t for t, score in zip(found.token_ids[0].tolist(), found.scores[0].tolist(), strict=True) if score > -1e9}
    boundary = {t for i, t in enumerate(ranked) if abs(sum(weights[:i]) - target) < Fraction(1, 10**9) * sum(weights)}
    assert chosen ^ expected <= boundary  # float has no exact percent


# ---------------------------------------------------------------- noise


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


@pytest.mark.parametrize("options", [{}, {"top_k": 40}, {"top_p": 0.9}])
def test_a_small_change_of_logits_seldom_changes_the_token(options: dict[str, float]) -> None:
    """Two workers' logits differ by rounding: noise that goes by token id makes their draws the same nearly always."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(300, 2000, generator=generator) * 2
    nearly = logits + torch.randn(300, 2000, generator=generator) * 1e-3
    params = [SamplingParams(max_tokens=1, seed=5, **options)] * 300  # type: ignore[arg-type]
    same = sample(logits, params, range(300)) == sample(nearly, params, range(300))
    assert same.float().mean() > 0.98


def test_seeds_and_positions_draw_independent_noise() -> None:
    keys = torch.tensor([noise_key(seed, position) for seed, position in ((1, 0), (1, 1), (2, 0), (2**63 - 1, 0))])
    noise = gumbel_noise(keys[:, None], torch.arange(50_000)[None, :])
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.02)  # Euler's constant: the mean of a standard Gumbel
    assert noise.var(dim=-1).mean().item() == pytest.approx(torch.pi**2 / 6, abs=0.05)
    assert torch.corrcoef(noise).fill_diagonal_(0).abs().max() < 0.02
    ahead = torch.stack((noise[:, :-1].flatten(), noise[:, 1:].flatten()))
    assert torch.corrcoef(ahead)[0, 1].abs() < 0.01  # one token's says nothing of the next one's


def test_noise_is_the_same_for_ever() -> None:
    """Computed with Python's integers: a worker of another version must not draw other tokens."""
    mask, expected = 2**64 - 1, []
    for token in (0, 1, 49151, 2**31 - 1):
        bits = (noise_key(7, 12) + token * 0x9E3779B97F4A7C15) & mask
        bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & mask
        bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & mask
        expected.append(-math.log(-math.log((((bits ^ (bits >> 31)) >> 12) + 0.5) / 2**52)))
    found = gumbel_noise(torch.tensor([[noise_key(7, 12)]]), torch.tensor([[0, 1, 49151, 2**31 - 1]]))
    assert found[0].tolist() == pytest.approx(expected, rel=1e-14)


def test_the_rarest_noise_is_finite() -> None:
    """Both ends of u. The hash is a bijection: these keys are what it takes to get all zeros and all ones."""
    unmixed = {0: 0, 2**64 - 1: _unmix(2**64 - 1)}
    keys = torch.tensor([[key - 2**64 if key >= 2**63 else key] for key in unmixed.values()])
    noise = gumbel_noise(keys, torch.tensor([[0]]))[:, 0].tolist()
    assert noise == pytest.approx([-math.log(53 * math.log(2)), 53 * math.log(2)], rel=1e-6)


def _unmix(x: int) -> int:
    """SplitMix64's output function, backwards."""
    x = x ^ (x >> 31) ^ (x >> 62)
    x = x * pow(0x94D049BB133111EB, -1, 2**64) % 2**64
    x = x ^ (x >> 27) ^ (x >> 54)
    x = x * pow(0xBF58476D1CE4E5B9, -1, 2**64) % 2**64
    return x ^ (x >> 30) ^ (x >> 60)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", [{}, {"top_k": 50}, {"top_p": 0.9}, {"top_k": 200, "top_p": 0.8}])
def test_a_gpu_draws_the_cpus_tokens(options: dict[str, float]) -> None:
    logits = torch.randn(64, 32_000, generator=torch.Generator().manual_seed(6)).mul(3).round(decimals=1)
    params = [SamplingParams(1, seed=seed, temperature=0.8, **options) for seed in range(64)]  # type: ignore[arg-type]
    assert torch.equal(sample(logits.cuda(), params, range(64)).cpu(), sample(logits, params, range(64)))
