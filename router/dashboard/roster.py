"""Who has been here: a worker that is gone is still shown for a while, so that nobody misses its death."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from common.pb import serving_pb2 as pb

GONE_S = 600.0  # for which it is remembered


@dataclass(frozen=True)
class Gone:
    hello: pb.WorkerHello
    has_drained: bool  # it left as it was told to; otherwise its connection just ended
    since_s: float  # by the clock


class Roster:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._gone: dict[str, Gone] = {}

    def left(self, hello: pb.WorkerHello, *, has_drained: bool) -> None:
        self._gone[hello.worker_id] = Gone(hello, has_drained, self._clock())

    def gone(self, members: Collection[str]) -> list[tuple[Gone, float]]:
        """With the seconds since then. Members have come back: that they were gone is forgotten."""
        now_s = self._clock()
        self._gone = {
            name: gone
            for name, gone in sorted(self._gone.items())
            if name not in members and now_s - gone.since_s < GONE_S
        }
        return [(gone, now_s - gone.since_s) for gone in self._gone.values()]
