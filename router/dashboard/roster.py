"""Who has been here: a worker that is gone is still shown for a while, so that nobody misses its death."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from common.pb import serving_pb2 as pb

GONE_S = 600.0  # for which it is remembered


@dataclass(frozen=True)
class Gone:
    hello: pb.WorkerHello
    has_left: bool  # it drained first; otherwise its stream broke
    since_s: float  # by the clock


class Roster:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[str, pb.WorkerSummary] = {}
        self._gone: dict[str, Gone] = {}

    def note(self, workers: Iterable[pb.WorkerSummary]) -> None:
        """The members as they are now."""
        here = {worker.hello.worker_id: worker for worker in workers}
        now_s = self._clock()
        for name in self._seen.keys() - here.keys():
            seen = self._seen[name]
            self._gone[name] = Gone(seen.hello, seen.load.is_draining, now_s)
        self._gone = {
            name: gone for name, gone in self._gone.items() if name not in here and now_s - gone.since_s < GONE_S
        }
        self._seen = here

    def gone(self) -> list[tuple[Gone, float]]:
        """With the seconds since then."""
        now_s = self._clock()
        return [(gone, now_s - gone.since_s) for _, gone in sorted(self._gone.items())]
