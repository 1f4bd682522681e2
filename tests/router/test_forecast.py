"""Water in lanes, against a simulation that gives each token to whoever is free first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.forecast import Lane, spare_share, start_s


@pytest.mark.parametrize(
    ("lanes", "tokens_ahead", "expected_s"),
    [
        ([Lane(0, 0.001)], 0, 0.0),
        ([Lane(500, 0.001)], 0, 0.5),
        ([Lane(500, 0.001)], 300, 0.8),
        ([Lane(500, 0.001), Lane(0, 0.001)], 0, 0.0),
        ([Lane(500, 0.001), Lane(0, 0.001)], 500, 0.5),
        ([Lane(500, 0.001), Lane(0, 0.001)], 700, 0.6),
        ([Lane(100, 0.001), Lane(0, 0.004)], 25, 0.1),
    ],
)
def test_a_prompt_begins_when_what_is_ahead_has_filled_the_lanes(
    lanes: list[Lane], tokens_ahead: int, expected_s: float
) -> None:
    assert start_s(lanes, tokens_ahead) == pytest.approx(expected_s)


@given(
    st.lists(st.builds(Lane, st.integers(0, 300), st.sampled_from([0.001, 0.002, 0.005])), min_size=1, max_size=4),
    st.integers(0, 500),
)
def test_it_is_within_one_token_of_giving_each_to_whoever_is_free_first(lanes: list[Lane], tokens_ahead: int) -> None:
    free_s = {index: lane.free_s for index, lane in enumerate(lanes)}
    for _ in range(tokens_ahead):
        first = min(free_s, key=lambda index: free_s[index])
        free_s[first] += lanes[first].s_per_token
    slowest_s = max(lane.s_per_token for lane in lanes)
    assert start_s(lanes, tokens_ahead) == pytest.approx(min(free_s.values()), abs=slowest_s + 1e-9)


def test_streams_take_the_share_of_their_steps() -> None:
    assert spare_share(0.03, 0.1) == pytest.approx(0.7)
    assert spare_share(0.2, 0.1) == 0.0
