"""The highest rate at which a server still meets its objectives: double until it fails, then halve the interval.

rate        1     2     4     8          low and high: attained and missed
attainment  1.00  1.00  0.95  0.31       → next: 5.7, between 4 and 8
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

AttainmentAt = Callable[[float], Awaitable[float]]  # requests per second → share of requests in [0, 1]


@dataclass(frozen=True)
class Search:
    goal: float = 0.9  # the share of requests that must meet their objectives
    first_rate: float = 1.0
    max_runs: int = 10
    precision: float = 1.1  # done when the lowest miss is at most this many times the highest success

    def __post_init__(self) -> None:
        assert self.first_rate > 0
        assert self.precision > 1


@dataclass(frozen=True)
class RatePoint:
    rate: float
    attainment: float


@dataclass(frozen=True)
class Sweep:
    """What was tried, in this order, and between which rates the answer lies."""

    points: tuple[RatePoint, ...]
    highest_rate: float | None  # that reached the goal; None: no rate did
    lowest_miss: float | None  # None: every rate reached the goal, and a higher one might


async def find_highest_rate(attainment_at: AttainmentAt, search: Search) -> Sweep:
    """Never more than `search.max_runs` runs. Raises: what `attainment_at` raises."""
    points: list[RatePoint] = []
    while len(points) < search.max_runs and (rate := next_rate(points, search)) is not None:
        points.append(RatePoint(rate, await attainment_at(rate)))
    return concluded(points, search.goal)


def concluded(points: Sequence[RatePoint], goal: float) -> Sweep:
    """What `points` say, however many there are yet."""
    return Sweep(tuple(points), *_bounds(points, goal))


def next_rate(points: Sequence[RatePoint], search: Search) -> float | None:
    """The rate to try after `points`; None when the answer is as precise as asked for."""
    low, high = _bounds(points, search.goal)
    match low, high:
        case None, None:
            return search.first_rate
        case float(), None:
            return low * 2
        case None, float():
            return high / 2
    assert low is not None
    assert high is not None
    return math.sqrt(low * high) if high / low > search.precision else None


def _bounds(points: Sequence[RatePoint], goal: float) -> tuple[float | None, float | None]:
    """The highest rate that reached the goal and the lowest that missed it. Rates beyond a known bound are never tried,
    so the first is always below the second."""
    attained = [point.rate for point in points if point.attainment >= goal]
    missed = [point.rate for point in points if point.attainment < goal]
    return max(attained, default=None), min(missed, default=None)
