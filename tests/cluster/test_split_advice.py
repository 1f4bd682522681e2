"""When splitting is advised, and with how many workers: examples, and what holds for all numbers."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.advice_report import advice_table, summary
from cluster.split_advice import (
    MAX_POOL,
    MIN_STREAMS,
    Prompt,
    Speeds,
    Verdict,
    advise,
    colocated_gap_s,
    pool_ratio,
    predicted_handoff_s,
)
from kv_transfer.transport import LinkSpeed

# One core: 1 ms per prompt token, 25 ms a step with 16 streams.
SPEEDS = Speeds(prefill_s_per_token=1e-3, step_s=0.025, num_streams=16, max_chunk_tokens=256, tpot_goal_s=0.15)
PROMPT = Prompt(num_tokens=512, output_tokens=128, kv_bytes=12_000_000, prefill_s=0.512, handoff_s=0.003)

seconds = st.floats(1e-6, 10)
speeds = st.builds(Speeds, st.floats(1e-7, 1e-1), seconds, st.integers(1, 256), st.integers(16, 8192), seconds)


def test_long_prompts_that_streams_would_feel_are_split() -> None:
    advice = advise(PROMPT, SPEEDS)
    assert advice.verdict is Verdict.SPLIT
    assert advice.colocated_gap_s == pytest.approx(0.15)  # cut to the streams' goal
    assert advice.split_gap_s == pytest.approx(0.025)


def test_a_link_too_slow_for_the_prompt_speaks_against_it() -> None:
    slow = dataclasses.replace(PROMPT, handoff_s=0.2)
    assert advise(slow, SPEEDS).verdict is Verdict.COLOCATE


def test_prompts_that_streams_hardly_feel_may_go_either_way() -> None:
    quick = dataclasses.replace(SPEEDS, prefill_s_per_token=1e-5)
    prompt = dataclasses.replace(PROMPT, prefill_s=0.005, handoff_s=0.0001)
    assert advise(prompt, quick).verdict is Verdict.EITHER


@pytest.mark.parametrize(("max_chunk_tokens", "gap_s"), [(64, 0.089), (256, 0.150), (2048, 0.150)])
def test_the_gap_is_a_step_and_a_chunk_or_the_goal(max_chunk_tokens: int, gap_s: float) -> None:
    speeds = dataclasses.replace(SPEEDS, max_chunk_tokens=max_chunk_tokens)
    assert colocated_gap_s(2048, speeds) == pytest.approx(gap_s)


def test_the_pools_are_about_equally_busy() -> None:
    # 0.512 s of prefill, 128 · 25 ms / 16 = 0.2 s of decode: 2.56, and 5 : 2 would be nearer by less than it costs
    assert pool_ratio(PROMPT, SPEEDS) == (3, 1, False)
    assert pool_ratio(dataclasses.replace(PROMPT, prefill_s=0.2), SPEEDS) == (1, 1, False)
    assert pool_ratio(dataclasses.replace(PROMPT, prefill_s=0.02), SPEEDS) == (1, 7, True)


def test_a_handoff_waits_for_its_last_piece_or_for_a_link_that_is_slower_than_the_prompt() -> None:
    quick, slow = LinkSpeed(1e9, 0.001), LinkSpeed(1e6, 0.001)
    assert predicted_handoff_s(10_000_000, 1.0, quick) < 0.01
    assert predicted_handoff_s(10_000_000, 1.0, slow) == pytest.approx(9.002)


def test_from_a_few_streams_nobody_learns_how_many_workers_to_start_with() -> None:
    advice = [advise(PROMPT, dataclasses.replace(SPEEDS, num_streams=MIN_STREAMS - 1, step_s=0.01))]
    assert (advice[0].verdict, advice[0].ratio) == (Verdict.SPLIT, None)
    told = " ".join(summary(advice, tpot_goal_s=0.15, num_cores=2))
    assert "start with" not in told
    assert f"ask again while {MIN_STREAMS} or more run" in told
    assert list(advice_table(advice).columns[6].cells) == ["-"]


def test_workers_are_recommended_for_prompts_that_are_split_and_only_then() -> None:
    dear = dataclasses.replace(PROMPT, num_tokens=128, handoff_s=0.4)
    long = dataclasses.replace(PROMPT, num_tokens=2048, prefill_s=2.048)
    told = " ".join(summary([advise(prompt, SPEEDS) for prompt in (dear, PROMPT, long)], tpot_goal_s=0.15, num_cores=2))
    assert "prompts of about 2,048 tokens" in told
    assert "start with at least 7 prefill workers and 1 decode worker" in told

    against = [advise(dataclasses.replace(prompt, handoff_s=2.0), SPEEDS) for prompt in (dear, PROMPT, long)]
    told = " ".join(summary(against, tpot_goal_s=0.15, num_cores=2))
    assert "start with" not in told
    assert "Nothing here speaks for splitting" in told
    assert list(advice_table(against).columns[6].cells) == ["-"] * 3


@given(prefill_s=seconds, output_tokens=st.integers(1, 4096), speeds=speeds)
def test_a_ratio_has_workers_of_both_kinds_and_never_more_than_one_can_start_with(
    prefill_s: float, output_tokens: int, speeds: Speeds
) -> None:
    prefill, decode, _ = pool_ratio(Prompt(128, output_tokens, 1, prefill_s, 0.0), speeds)
    assert prefill >= 1
    assert decode >= 1
    assert prefill + decode <= MAX_POOL


@given(tokens=st.integers(1, 100_000), speeds=speeds)
def test_a_prompt_beside_streams_never_makes_their_steps_shorter(tokens: int, speeds: Speeds) -> None:
    assert (
        speeds.step_s < colocated_gap_s(tokens, speeds) <= speeds.step_s + tokens * speeds.prefill_s_per_token * 1.001
    )
