"""What is learned from steps, and how much of a prompt fits beside streams."""

from __future__ import annotations

import random

import pytest

from engine.pace import GOAL_SHARE, MIN_PROMPT_TOKENS, Pace

BASE_S, TOKEN_S, SEQUENCE_S = 0.008, 0.001, 0.0005


def step_s(num_prompt_tokens: int, num_decodes: int) -> float:
    return BASE_S + TOKEN_S * num_prompt_tokens + SEQUENCE_S * num_decodes


def observed(pace: Pace, steps: list[tuple[int, int]], seed: int = 0) -> Pace:
    noise = random.Random(seed)
    for num_prompt_tokens, num_decodes in steps:
        pace.observe(num_prompt_tokens, num_decodes, step_s(num_prompt_tokens, num_decodes) * noise.uniform(0.97, 1.03))
    return pace


def test_nothing_is_known_before_the_first_step_and_nothing_is_cut() -> None:
    pace = Pace(256, tpot_goal_s=0.1)
    assert (pace.prefill_s_per_token(), pace.decode_step_s(4), pace.prompt_budget(4)) == (0.0, 0.0, 252)


def test_a_prompt_is_cut_to_what_fits_beside_its_neighbours() -> None:
    steps = [(0, 4), (0, 8), (0, 2), (256, 0), (100, 0), (30, 4), (200, 8)] * 20
    pace = observed(Pace(256, tpot_goal_s=0.1), steps)
    for num_decodes in (1, 4, 16):
        budget = pace.prompt_budget(num_decodes)
        assert step_s(budget, num_decodes) == pytest.approx(GOAL_SHARE * 0.1, rel=0.1)
    assert pace.prompt_budget(0) == 256


def test_prompts_move_on_even_where_streams_miss_their_goal_anyway() -> None:
    pace = observed(Pace(256, tpot_goal_s=0.005), [(0, 4), (256, 0), (100, 0)] * 10)
    assert pace.prompt_budget(4) == MIN_PROMPT_TOKENS
    assert pace.prompt_budget(250) == 6  # and a step has no more tokens than it may


def test_without_a_goal_nothing_is_cut() -> None:
    assert observed(Pace(256), [(0, 4), (256, 0)] * 10).prompt_budget(4) == 252


def test_streams_alone_do_not_wash_out_what_prompts_cost() -> None:
    pace = observed(Pace(256, tpot_goal_s=0.1), [(256, 0), (100, 0), (0, 4)] * 10 + [(0, 4)] * 5000)
    assert 60 < pace.prompt_budget(4) < 100


def test_speeds_follow_a_machine_that_becomes_slower() -> None:
    pace = observed(Pace(256), [(256, 0), (100, 0), (0, 4), (0, 1)] * 20)
    assert pace.prefill_s_per_token() == pytest.approx(step_s(256, 0) / 256, rel=0.1)
    assert pace.decode_step_s(4) == pytest.approx(step_s(0, 4), rel=0.1)
    for _ in range(200):
        pace.observe(256, 0, 2 * step_s(256, 0))
    assert pace.prefill_s_per_token() == pytest.approx(2 * step_s(256, 0) / 256, rel=0.1)


def test_a_rate_is_told_only_once_a_step_was_long_enough_to_tell() -> None:
    """A handful of tokens takes as long as many on a GPU; told as a rate, they would have long prompts refused."""
    pace = Pace(2048)
    pace.observe(37, 0, 0.02)
    assert pace.prefill_s_per_token() == 0.0
    pace.observe(1024, 0, 0.06)
    assert pace.prefill_s_per_token() == pytest.approx(0.1 / 2048, rel=0.1)


def test_a_machine_that_was_slow_for_a_while_is_believed_to_be_quick_again_after_few_steps() -> None:
    pace = observed(Pace(256), [(256, 0), (100, 0), (0, 4), (0, 1)] * 20)
    for _ in range(100):
        pace.observe(256, 0, 5 * step_s(256, 0))
    for _ in range(10):
        pace.observe(256, 0, step_s(256, 0))
    assert pace.prefill_s_per_token() < 2 * step_s(256, 0) / 256
