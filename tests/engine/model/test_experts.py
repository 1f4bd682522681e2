"""The mixture of experts against one token at a time, one expert at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from engine.model.config import ExpertsConfig
from engine.model.experts import MixtureOfExperts

CPU = torch.device("cpu")
HIDDEN, INNER = 16, 24


def random_mixture(config: ExpertsConfig, dtype: torch.dtype = torch.float32, seed: int = 0) -> MixtureOfExperts:
    mixture = MixtureOfExperts(HIDDEN, config, dtype=dtype, device=CPU)
    generator = torch.Generator().manual_seed(seed)
    for parameter in mixture.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return mixture


def random_tokens(count: int, seed: int = 1) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))


def one_by_one(mixture: MixtureOfExperts, config: ExpertsConfig, x: Tensor) -> Tensor:
    """In float64: what each token's experts say of it, in the order of their probability."""
    router, gate_up, down = (p.double() for p in mixture.parameters())
    gate_up, down = (
        gate_up.view(-1, 2, config.intermediate_size, HIDDEN),
        down.view(-1, HIDDEN, config.intermediate_size),
    )
    answers = []
    for token in x.double():
        probabilities = (router @ token).softmax(dim=0)
        chosen = probabilities.argsort(descending=True)[: config.num_active]
        total = probabilities[chosen].sum() if config.is_renormalised else 1.0
        said = [down[e] @ (F.silu(gate_up[e, 0] @ token) * (gate_up[e, 1] @ token)) for e in chosen]
        answers.append(sum(p / total * answer for p, answer in zip(probabilities[chosen], said, strict=True)))
    return torch.stack([torch.as_tensor(answer) for answer in answers])


@given(
    num_experts=st.integers(1, 9),
    share=st.floats(0, 1),
    num_tokens=st.integers(1, 40),
    is_renormalised=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_every_token_gets_the_answer_of_its_own_experts(
    num_experts: int, share: float, num_tokens: int, is_renormalised: bool, seed: int
) -> None:
    config = ExpertsConfig(num_experts, max(1, round(share * num_experts)), INNER, is_renormalised)
    mixture, x = random_mixture(config, seed=seed), random_tokens(num_tokens, seed)
    expected = one_by_one(mixture, config, x).float()
    torch.testing.assert_close(mixture(x), expected, atol=1e-5, rtol=1e-4)


def test_experts_that_nobody_chose_and_one_that_all_chose_are_no_special_cases() -> None:
    config = ExpertsConfig(6, 1, INNER, False)
    mixture, x = random_mixture(config), random_tokens(1).repeat(12, 1)
    torch.testing.assert_close(mixture(x), one_by_one(mixture, config, x).float(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_answers_in_kind_and_near_the_exact_sum(dtype: torch.dtype) -> None:
    config = ExpertsConfig(8, 8, INNER, True)  # all active: no rounding can tip a choice
    mixture, x = random_mixture(config, dtype), random_tokens(20).to(dtype)
    answer = mixture(x)
    assert answer.dtype == dtype
    torch.testing.assert_close(answer.float(), one_by_one(mixture, config, x).float(), atol=3e-2, rtol=3e-2)
