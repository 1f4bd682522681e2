from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.lifecycle import ENDS, TRANSITIONS, IllegalTransition, Stage, State, Timeline


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


def test_a_request_without_a_second_token_has_no_tpot() -> None:
    timeline = Timeline(FakeClock())
    assert timeline.ttft_s is None
    timeline.count_token()
    assert timeline.tpot_s is None
