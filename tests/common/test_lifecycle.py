from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.lifecycle import ENDS, MAX_INTERVALS, TRANSITIONS, IllegalTransition, Stage, State, Timeline


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_stages_of_a_disaggregated_request_are_its_waits_in_order() -> None:
    clock = FakeClock()
    timeline = Timeline(clock)
    steps = [
        (1, lambda: timeline.enter(State.RESERVING)),
        (2, lambda: timeline.enter(State.PREFILLING)),
        (3, lambda: timeline.enter_stage(Stage.PREFILL)),
        (4, lambda: timeline.enter(State.TRANSFERRING)),
        (0, timeline.count_token),
        (5, lambda: timeline.enter(State.DECODING, Stage.DECODE_WAIT)),
        (6, lambda: timeline.enter_stage(Stage.DECODE)),
        (0, timeline.count_token),
        (7, timeline.count_token),
        (0, lambda: timeline.enter(State.FINISHED)),
    ]
    for seconds, step in steps:
        clock.now += seconds
        step()
    names = ["queue", "reserve", "prefill_queue", "prefill", "transfer", "decode_wait", "decode"]
    assert list(timeline.stages.items()) == [(Stage(name), index + 1) for index, name in enumerate(names)]
    assert timeline.ttft_s == 10
    assert timeline.end_to_end_s == 28
    assert timeline.tpot_s == 9


@given(st.lists(st.tuples(st.sampled_from(list(State)), st.floats(0, 10)), max_size=30))
def test_after_any_history_the_stages_add_up_and_only_the_tables_steps_happen(
    history: list[tuple[State, float]],
) -> None:
    clock = FakeClock()
    timeline = Timeline(clock)
    for state, seconds in history:
        clock.now += seconds
        before = timeline.state
        may_end_badly = state in (State.CANCELLED, State.FAILED) and before not in ENDS
        if state in TRANSITIONS[before] or may_end_badly:
            timeline.enter(state)
            assert timeline.state is state
        else:
            with pytest.raises(IllegalTransition):
                timeline.enter(state)
            assert timeline.state is before
    if timeline.is_ended:
        assert sum(timeline.stages.values()) == pytest.approx(timeline.end_to_end_s)


def test_the_intervals_are_the_stages_one_by_one_also_where_a_request_goes_through_them_twice() -> None:
    clock = FakeClock()
    timeline = Timeline(clock)
    for state in (State.RESERVING, State.QUEUED, State.RESERVING):
        clock.now += 1
        timeline.enter(state)
    clock.now += 5
    assert [(each.stage, each.start_s - 100, each.end_s - 100) for each in (*timeline.intervals, timeline.current)] == [
        (Stage.QUEUE, 0, 1),
        (Stage.RESERVE, 1, 2),
        (Stage.QUEUE, 2, 3),
        (Stage.RESERVE, 3, 8),
    ]


def test_a_request_that_is_tried_for_ever_remembers_only_its_first_intervals_but_every_second() -> None:
    clock = FakeClock()
    timeline = Timeline(clock)
    for _ in range(MAX_INTERVALS):
        for state in (State.RESERVING, State.QUEUED):
            clock.now += 1
            timeline.enter(state)
    assert len(timeline.intervals) == MAX_INTERVALS
    assert sum(timeline.stages.values()) == 2 * MAX_INTERVALS


def test_each_token_but_the_first_tells_the_gap_before_it() -> None:
    clock = FakeClock()
    timeline = Timeline(clock)
    gaps = []
    for seconds in (3, 2, 1):
        clock.now += seconds
        gaps.append(timeline.count_token())
    assert gaps == [None, 2, 1]


def test_a_request_without_a_second_token_has_no_tpot() -> None:
    timeline = Timeline(FakeClock())
    assert timeline.ttft_s is None
    timeline.count_token()
    assert timeline.tpot_s is None
