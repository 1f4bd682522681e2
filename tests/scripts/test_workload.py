from __future__ import annotations

import math
from dataclasses import replace
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.trace import TraceRow
from loadgen.workload import (
    NUM_SKIPPED_IDS,
    Burst,
    ClosedLoop,
    Constant,
    LengthRange,
    Poisson,
    PromptKind,
    Replay,
    Workload,
    plan,
)

lengths = st.tuples(st.integers(1, 60), st.integers(0, 60)).map(lambda pair: LengthRange(pair[0], sum(pair)))
workloads = st.builds(
    Workload,
    pacing=st.one_of(st.builds(Poisson, st.floats(0.1, 1000)), st.builds(ClosedLoop, st.integers(1, 9))),
    input_tokens=lengths,
    output_tokens=lengths,
    vocab_size=st.integers(2, 50_000),
    num_requests=st.integers(0, 20),
    seed=st.integers(0, 2**32),
)


@given(workloads)
def test_a_plan_holds_what_was_asked_for(workload: Workload) -> None:
    requests = list(plan(workload))
    assert len(requests) == workload.num_requests == workload.num_planned
    for request in requests:
        assert workload.input_tokens.low <= request.input_tokens <= workload.input_tokens.high
        assert workload.output_tokens.low <= request.output_tokens <= workload.output_tokens.high
        assert len(request.prompt) == request.input_tokens
        first = min(NUM_SKIPPED_IDS, workload.vocab_size // 2)
        assert all(isinstance(token, int) and first <= token < workload.vocab_size for token in request.prompt)
    assert all(earlier.arrival_s <= later.arrival_s for earlier, later in pairwise(requests))


@given(workloads)
def test_one_seed_is_one_schedule_and_another_seed_is_another(workload: Workload) -> None:
    workload = replace(workload, input_tokens=LengthRange(40, 60), num_requests=3, vocab_size=30_000)
    assert list(plan(workload)) == list(plan(workload))
    other = list(plan(replace(workload, seed=workload.seed + 1)))
    assert [request.prompt for request in other] != [request.prompt for request in plan(workload)]


def test_poisson_arrivals_have_the_rate_and_the_spread_of_a_poisson_process() -> None:
    workload = Workload(Poisson(rate=50.0), input_tokens=LengthRange(1, 1))
    arrivals = [request.arrival_s for request in islice(plan(workload), 10_000)]
    gaps = [later - earlier for earlier, later in pairwise([0.0, *arrivals])]
    mean = sum(gaps) / len(gaps)
    spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert mean == pytest.approx(0.02, rel=0.05)
    assert spread == pytest.approx(mean, rel=0.05)  # an exponential's mean is its standard deviation


def test_an_infinite_rate_sends_everything_at_once() -> None:
    workload = Workload(Poisson(math.inf), num_requests=5)
    assert [request.arrival_s for request in plan(workload)] == [0.0] * 5


def test_a_constant_rate_has_equal_gaps() -> None:
    arrivals = [request.arrival_s for request in plan(Workload(Constant(4.0), num_requests=5))]
    assert arrivals == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_a_burst_comes_at_once_and_keeps_the_mean_rate() -> None:
    arrivals = [request.arrival_s for request in plan(Workload(Burst(rate=2.0, size=3), num_requests=7))]
    assert arrivals == [0.0, 0.0, 0.0, 1.5, 1.5, 1.5, 3.0]


def test_a_duration_ends_an_open_loop_plan() -> None:
    workload = Workload(Poisson(100.0), duration_s=2.0)
    arrivals = [request.arrival_s for request in plan(workload)]
    assert max(arrivals) < 2.0
    assert 150 < len(arrivals) < 250
    assert workload.num_planned is None


def test_changing_the_lengths_leaves_the_arrivals_alone() -> None:
    short = Workload(Poisson(7.0), input_tokens=LengthRange(1, 9), num_requests=20, seed=3)
    long = replace(short, input_tokens=LengthRange(100, 200))
    assert [request.arrival_s for request in plan(short)] == [request.arrival_s for request in plan(long)]


def test_a_trace_is_replayed_from_its_first_row_at_the_speed_asked_for() -> None:
    trace = (TraceRow(100.0, 5, 2), TraceRow(100.5, 7, 3), TraceRow(104.0, 6, 1))
    requests = list(plan(Workload(Replay(speed=2.0), trace=trace)))
    assert [request.arrival_s for request in requests] == [0.0, 0.25, 2.0]
    assert [(request.input_tokens, request.output_tokens) for request in requests] == [(5, 2), (7, 3), (6, 1)]


def test_a_trace_bounds_the_number_of_requests() -> None:
    workload = Workload(ClosedLoop(4), trace=(TraceRow(0, 5, 2),) * 3, num_requests=10)
    assert len(list(plan(workload))) == workload.num_planned == 3


def test_equal_hash_ids_are_equal_tokens_and_nothing_else_is() -> None:
    trace = (TraceRow(0, 1000, 1, (7, 8)), TraceRow(0, 700, 1, (7, 9)), TraceRow(0, 512, 1, (8,)))
    first, second, third = (request.prompt for request in plan(Workload(Replay(), trace=trace)))
    assert (len(first), len(second), len(third)) == (1000, 700, 512)
    assert first[:512] == second[:512]
    assert first[512:700] != second[512:700]
    assert first[512:] == third[: 1000 - 512]


def test_shared_prefixes_are_shared_in_words_too() -> None:
    trace = (TraceRow(0, 600, 1, (7, 8)), TraceRow(0, 700, 1, (7, 9)))
    workload = Workload(Replay(), trace=trace, prompt_kind=PromptKind.TEXT)
    first, second = (str(request.prompt).split() for request in plan(workload))
    assert (len(first), len(second)) == (600, 700)
    assert first[:512] == second[:512]
    assert first[512:] != second[512:600]


def test_text_prompts_have_one_word_per_token() -> None:
    workload = Workload(ClosedLoop(1), LengthRange(12, 12), prompt_kind=PromptKind.TEXT, num_requests=2)
    first, second = (request.prompt for request in plan(workload))
    assert isinstance(first, str)
    assert len(first.split()) == 12
    assert first != second


@pytest.mark.parametrize(("text", "low", "high"), [("512", 512, 512), ("1", 1, 1), ("128:1024", 128, 1024)])
def test_a_length_is_a_number_or_a_range(text: str, low: int, high: int) -> None:
    assert LengthRange.parse(text) == LengthRange(low, high)


@pytest.mark.parametrize("text", ["", "0", "-5", "9:3", "a", "1:b", "1:2:3", "64:", ":64"])
def test_anything_else_is_not_a_length(text: str) -> None:
    with pytest.raises(ValueError, match="length"):
        LengthRange.parse(text)
