"""How a worker leaves: no new work, and what it has ends by itself or, once the bound has passed, elsewhere."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from common.errors import WorkerDraining

logger = logging.getLogger(__name__)

UNWIND_S = 2.0  # for the calls that the bound has ended to be gone


class Drain:
    """Every call that is work runs inside `work()`. Once begun, draining is never taken back: the process ends."""

    def __init__(self, worker_id: str, timeout_s: float) -> None:
        self._worker_id = worker_id
        self._timeout_s = timeout_s
        self._end_s: float | None = None  # of the event loop's clock; None: not draining
        self._bounds: set[asyncio.Timeout] = set()  # one for each call under way
        self._has_begun = asyncio.Event()
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def is_draining(self) -> bool:
        return self._end_s is not None

    @asynccontextmanager
    async def work(self) -> AsyncIterator[None]:
        """Raises: WorkerDraining, at once or when the bound passes; the router goes on elsewhere."""
        if self.is_draining:
            raise WorkerDraining(f"{self._worker_id} is draining and takes no new work")
        bound = asyncio.timeout(None)
        try:
            async with bound:
                self._bounds.add(bound)
                self._is_idle.clear()
                try:
                    yield
                finally:
                    self._bounds.remove(bound)
                    if not self._bounds:
                        self._is_idle.set()
        except TimeoutError:
            if not bound.expired():
                raise
            raise WorkerDraining(f"{self._worker_id} is leaving; this request goes on elsewhere") from None

    def begin(self, timeout_s: float | None = None) -> None:
        """None: the worker's own bound. Of several wishes the most urgent counts."""
        end_s = asyncio.get_running_loop().time() + (self._timeout_s if timeout_s is None else timeout_s)
        if self._end_s is not None and self._end_s <= end_s:
            return
        self._end_s = end_s
        logger.info("%s is draining: %d calls are under way", self._worker_id, len(self._bounds))
        for bound in self._bounds:
            bound.reschedule(end_s)
        self._has_begun.set()

    async def ended(self) -> None:
        """Waits for the wish to drain, and then until nothing is under way; the bound holds for that."""
        await self._has_begun.wait()
        while self._bounds and self._left_s() > 0:
            try:
                await asyncio.wait_for(self._is_idle.wait(), self._left_s())
            except TimeoutError:  # or the bound has come nearer
                continue

    def _left_s(self) -> float:
        assert self._end_s is not None
        return self._end_s + UNWIND_S - asyncio.get_running_loop().time()
