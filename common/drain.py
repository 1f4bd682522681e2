"""How a worker leaves: no new work, and what it has ends by itself or, once the bound has passed, elsewhere."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

from common.errors import WorkerDraining

logger = logging.getLogger(__name__)

E = TypeVar("E")

UNWIND_S = 2.0  # for the calls that the bound has ended to be gone


class Drain:
    """Every call that is work streams through `work`. Once begun, draining is never taken back: the process ends."""

    def __init__(self, worker_id: str, timeout_s: float) -> None:
        self._worker_id = worker_id
        self._timeout_s = timeout_s
        self._end_s: float | None = None  # of the event loop's clock; None: not draining
        self._waits: set[asyncio.Timeout] = set()  # for the next event of a call; none while one is being sent
        self._num_under_way = 0
        self._has_begun = asyncio.Event()
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def is_draining(self) -> bool:
        return self._end_s is not None

    async def work(self, events: AsyncGenerator[E, None]) -> AsyncGenerator[E, None]:
        """One call's events. Owns `events`, and closes it in every case.

        Raises: WorkerDraining, at once or when the bound passes; the router goes on elsewhere.
        """
        async with aclosing(events):
            if self.is_draining:
                raise WorkerDraining(f"{self._worker_id} is draining and takes no new work")
            self._num_under_way += 1
            self._is_idle.clear()
            try:
                while (event := await self._next(events)) is not None:
                    yield event
            finally:
                self._num_under_way -= 1
                if self._num_under_way == 0:
                    self._is_idle.set()

    async def _next(self, events: AsyncGenerator[E, None]) -> E | None:
        """None at the end. Only this wait is cut short: a call that is cancelled while it sends would never end for its
        client."""
        leaving = WorkerDraining(f"{self._worker_id} is leaving; this request goes on elsewhere")
        if self._end_s is not None and asyncio.get_running_loop().time() >= self._end_s:
            raise leaving
        wait = asyncio.timeout_at(self._end_s)
        try:
            async with wait:
                self._waits.add(wait)
                try:
                    return await anext(events, None)
                finally:
                    self._waits.remove(wait)
        except TimeoutError:
            if not wait.expired():
                raise
            raise leaving from None

    def begin(self, timeout_s: float | None = None) -> None:
        """None: the worker's own bound. Of several wishes the most urgent counts."""
        end_s = asyncio.get_running_loop().time() + (self._timeout_s if timeout_s is None else timeout_s)
        if self._end_s is not None and self._end_s <= end_s:
            return
        self._end_s = end_s
        logger.info("%s is draining: %d calls are under way", self._worker_id, self._num_under_way)
        for wait in self._waits:
            wait.reschedule(end_s)
        self._has_begun.set()

    async def ended(self) -> None:
        """Waits for the wish to drain, and then until nothing is under way; the bound holds for that."""
        await self._has_begun.wait()
        while self._num_under_way and self._left_s() > 0:
            try:
                await asyncio.wait_for(self._is_idle.wait(), self._left_s())
            except TimeoutError:  # or the bound has come nearer
                continue

    def _left_s(self) -> float:
        assert self._end_s is not None
        return self._end_s + UNWIND_S - asyncio.get_running_loop().time()
