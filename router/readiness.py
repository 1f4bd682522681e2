"""Whether to wait a moment: a router that has just begun, or that stood still, is about to hear from its workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

# A process that stood still for two seconds finds every worker's stream broken when it goes on, and so does a new one
# find nobody; each worker comes (back) within half a second, and its pairs are checked in a few tenths.
RETURN_S = 3.0
POLL_S = 0.02


class Readiness:
    """Remembers when requests could last be served."""

    def __init__(
        self,
        not_ready_reason: Callable[[], str | None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._not_ready_reason = not_ready_reason
        self._clock = clock
        self._sleep = sleep
        self._could_serve_s = clock()  # it has just begun, so nobody can have come yet

    def note(self) -> None:
        """To be called before somebody leaves, and whenever somebody was heard of."""
        if self._not_ready_reason() is None:
            self._could_serve_s = self._clock()

    def unready_s(self) -> float:
        """For how long requests could not be served; 0 if they can."""
        return 0.0 if self._not_ready_reason() is None else self._clock() - self._could_serve_s

    async def wait(self) -> None:
        """Returns when requests can be served, or have not been for RETURN_S: at once, as a rule."""
        while self._not_ready_reason() is not None and self.unready_s() < RETURN_S:
            await self._sleep(POLL_S)
