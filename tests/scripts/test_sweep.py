from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.sweep import RatePoint, Search, find_highest_rate, next_rate


def server_good_up_to(capacity: float) -> Callable[[float], Awaitable[float]]:
    """Meets every objective up to its capacity; beyond, only that many requests a second do."""

    async def attainment_at(rate: float) -> float:
        return min(1.0, capacity / rate)

    return attainment_at


async def test_the_rate_is_doubled_until_it_fails_and_the_interval_is_halved_then() -> None:
    sweep = await find_highest_rate(server_good_up_to(5.0), Search(goal=0.9, precision=1.1))
    assert [point.rate for point in sweep.points[:4]] == [1, 2, 4, 8]
    assert sweep.points[4].rate == pytest.approx(32**0.5)  # halfway between 4 and 8 by ratio
    assert sweep.highest_rate is not None
    assert sweep.lowest_miss is not None
    assert sweep.highest_rate <= 5.0 / 0.9 < sweep.lowest_miss <= sweep.highest_rate * 1.1


async def test_the_rate_is_halved_when_the_first_one_is_too_high() -> None:
    sweep = await find_highest_rate(server_good_up_to(0.3), Search(first_rate=4.0, max_runs=12))
    assert [point.rate for point in sweep.points[:5]] == [4, 2, 1, 0.5, 0.25]
    assert sweep.highest_rate == pytest.approx(0.3 / 0.9, rel=0.1)


async def test_a_server_that_never_fails_has_no_known_limit() -> None:
    sweep = await find_highest_rate(server_good_up_to(1e9), Search(max_runs=5))
    assert (len(sweep.points), sweep.highest_rate, sweep.lowest_miss) == (5, 16.0, None)


async def test_a_server_that_always_fails_has_no_rate() -> None:
    sweep = await find_highest_rate(server_good_up_to(0.0), Search(max_runs=4))
    assert (len(sweep.points), sweep.highest_rate, sweep.lowest_miss) == (4, None, 0.125)


async def test_a_goal_that_is_met_exactly_is_met() -> None:
    sweep = await find_highest_rate(server_good_up_to(1.8), Search(goal=0.9, max_runs=2))
    assert sweep.highest_rate == 2.0


def test_nothing_is_tried_once_the_answer_is_precise_enough() -> None:
    points = [RatePoint(10.0, 0.95), RatePoint(10.9, 0.2)]
    assert next_rate(points, Search(precision=1.1)) is None
    assert next_rate(points, Search(precision=1.05)) == pytest.approx(109**0.5)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.floats(0.01, 100))
def test_however_noisy_the_runs_are_the_bounds_stay_in_order(attained: list[float], first_rate: float) -> None:
    search = Search(first_rate=first_rate)
    points: list[RatePoint] = []
    for attainment in attained:
        if (rate := next_rate(points, search)) is None:
            break
        points.append(RatePoint(rate, attainment))
    reached = [point.rate for point in points if point.attainment >= search.goal]
    missed = [point.rate for point in points if point.attainment < search.goal]
    assert not reached or not missed or max(reached) < min(missed)


async def test_a_run_that_raises_ends_the_sweep() -> None:
    async def breaks(rate: float) -> float:
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        await find_highest_rate(breaks, Search())
