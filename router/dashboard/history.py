"""The last minutes, second by second, so that a page that is opened now shows what happened before."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from router.dashboard.reading import Distribution, Reading

LATENCIES = ("ttft_seconds", "tpot_seconds", "itl_seconds")
QUANTILES = (0.5, 0.99)
TICK_S = 1.0
WINDOW_TICKS = 10  # that each point looks back over
KEPT_TICKS = 300


@dataclass(frozen=True)
class Point:
    """What was going on at one moment. Rates and quantiles are of the WINDOW_TICKS before it."""

    number: int
    time_s: float  # since the epoch
    queued: float
    active: float
    requests_per_s: float  # that ended
    tokens_per_s: float
    quantiles: Mapping[str, tuple[float | None, ...]]  # by latency; None: nobody had any
    link_bytes_per_s: Mapping[tuple[str, str], float]  # by prefill and decode worker


@dataclass(frozen=True)
class _Tick:
    time_s: float
    requests: float
    latencies: Mapping[str, Distribution]
    link_bytes: Mapping[tuple[str, str], float]

    @property
    def tokens(self) -> float:
        """Sent so far; an answer's first one has a time to first token, each later one a gap before it."""
        return self.latencies["ttft_seconds"].count + self.latencies["itl_seconds"].count


class History:
    def __init__(self) -> None:
        self._ticks: deque[_Tick] = deque(maxlen=WINDOW_TICKS + 1)
        self._points: deque[Point] = deque(maxlen=KEPT_TICKS)
        self._number = 0

    def note(self, reading: Reading, time_s: float) -> None:
        """Once for each TICK_S."""
        tick = _Tick(
            time_s,
            reading.total("requests_total"),
            {name: reading.distribution(name) for name in LATENCIES},
            {(labels["prefill"], labels["decode"]): value for labels, value in reading.rows("link_bytes_total")},
        )
        self._ticks.append(tick)
        if len(self._ticks) > 1:
            self._number += 1
            self._points.append(_point(self._number, reading, self._ticks[0], tick))

    def since(self, number: int) -> list[Point]:
        """The points after that one; 0: all that are kept."""
        return [point for point in self._points if point.number > number]

    @property
    def last(self) -> Point | None:
        return self._points[-1] if self._points else None


def _point(number: int, reading: Reading, then: _Tick, now: _Tick) -> Point:
    seconds = max(1e-3, now.time_s - then.time_s)
    spread = {name: latency.since(then.latencies[name]) for name, latency in now.latencies.items()}
    return Point(
        number=number,
        time_s=now.time_s,
        queued=reading.total("queued_requests"),
        active=reading.total("active_requests"),
        requests_per_s=(now.requests - then.requests) / seconds,
        tokens_per_s=(now.tokens - then.tokens) / seconds,
        quantiles={name: tuple(each.quantile(share) for share in QUANTILES) for name, each in spread.items()},
        # a link that was made anew counts from 0
        link_bytes_per_s={
            link: max(0.0, num_bytes - then.link_bytes.get(link, num_bytes)) / seconds
            for link, num_bytes in now.link_bytes.items()
        },
    )
