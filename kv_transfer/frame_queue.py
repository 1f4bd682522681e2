"""A queue that any thread may fill and one task empties, in the order of the `put` calls."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import Generic, TypeVar

Frame = TypeVar("Frame")


class FrameQueue(Generic[Frame]):
    """Made, read and closed on one event loop. Never blocks a `put`: its length is bounded by what the transfers in
    flight have to send, which their admission bounds."""

    def __init__(self) -> None:
        self._frames: deque[Frame] = deque()  # append and popleft are atomic
        self._is_filled = asyncio.Event()
        self._is_waking = False  # the loop is told already, and has not come round yet
        self._loop = asyncio.get_running_loop()
        self.is_closed = False

    def put(self, frame: Frame) -> None:
        """Safe from any thread. Dropped once the queue is closed."""
        if self.is_closed:
            return
        self._frames.append(frame)
        if not self._is_waking:
            self._is_waking = True
            with suppress(RuntimeError):  # the loop is gone, and with it everyone who would have read the frame
                self._loop.call_soon_threadsafe(self._wake)

    async def get(self) -> Frame:
        while not self._frames:
            self._is_filled.clear()
            await self._is_filled.wait()
        return self._frames.popleft()

    def close(self) -> None:
        """Drop what is queued and whatever comes."""
        self.is_closed = True
        self._frames.clear()

    def _wake(self) -> None:
        self._is_waking = False  # first: whoever finds it set has put its frame by now
        self._is_filled.set()
