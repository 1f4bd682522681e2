"""A queue that any thread may fill and one task empties, in the order of the `put` calls."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from kv_transfer.wakeup import Wakeup

Frame = TypeVar("Frame")


class FrameQueue(Generic[Frame]):
    """Made, read and closed on one event loop. Never blocks a `put`: its length is bounded by what the transfers in
    flight have to send, which their admission bounds."""

    def __init__(self) -> None:
        self._frames: deque[Frame] = deque()  # append and popleft are atomic
        self._is_filled = Wakeup()
        self.is_closed = False

    def put(self, frame: Frame) -> None:
        """Safe from any thread. Dropped once the queue is closed."""
        if self.is_closed:
            return
        self._frames.append(frame)
        self._is_filled.call()

    async def get(self) -> Frame:
        while not self._frames:
            self._is_filled.clear()
            await self._is_filled.wait()
        return self._frames.popleft()

    def close(self) -> None:
        """Drop what is queued and whatever comes."""
        self.is_closed = True
        self._frames.clear()
