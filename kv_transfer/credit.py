"""Back-pressure without blocking: what a destination has room for, and what a source has yet to send."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable

from common.errors import PeerLost
from kv_transfer.wakeup import Wakeup
from kv_transfer.wire import MAX_PIECE_BYTES


class Credit:
    """Bytes that the destination can stage now; lives on the event loop. None: a peer that counts none."""

    def __init__(self, num_bytes: int | None, stall_timeout_s: float) -> None:
        self._num_bytes = num_bytes
        self._stall_timeout_s = stall_timeout_s
        self._is_more = asyncio.Event()

    def give(self, num_bytes: int) -> None:
        if self._num_bytes is not None:
            self._num_bytes += num_bytes
            self._is_more.set()

    async def take(self, num_bytes: int) -> None:
        """Wait for as much. One taker at a time. Raises: PeerLost when none came for stall_timeout_s."""
        if self._num_bytes is None:
            return
        while self._num_bytes < num_bytes:
            self._is_more.clear()
            try:
                async with asyncio.timeout(self._stall_timeout_s):
                    await self._is_more.wait()
            except TimeoutError:
                raise PeerLost(f"the destination has made no room for KV within {self._stall_timeout_s} s") from None
        self._num_bytes -= num_bytes


class Backlog:
    """Bytes handed to a link and not yet written. Full, it asks its producers to pause; it never blocks them.

    on_room: called on the event loop when it was full and half of it is gone.
    """

    def __init__(self, limit_bytes: int, on_room: Callable[[], None]) -> None:
        self.limit_bytes = limit_bytes
        self._on_room = on_room
        self._lock = threading.Lock()
        self._num_bytes = 0
        self._was_full = False

    @property
    def has_room(self) -> bool:
        """From any thread."""
        with self._lock:
            is_full = self._num_bytes >= (self.limit_bytes // 2 if self._was_full else self.limit_bytes)
            self._was_full = is_full
            return not is_full

    def add(self, num_bytes: int) -> None:
        """From any thread."""
        with self._lock:
            self._num_bytes += num_bytes

    def remove(self, num_bytes: int) -> None:
        """On the event loop."""
        with self._lock:
            self._num_bytes -= num_bytes
            has_room_again = self._was_full and self._num_bytes < self.limit_bytes // 2
            self._was_full = self._was_full and not has_room_again
        if has_room_again:
            self._on_room()


class FreedBytes:
    """Collects what a staging ring frees, on whichever thread, into few credits for the source."""

    def __init__(self, window_bytes: int) -> None:
        """A credit is due at a quarter of the window; where what is left of it may not do for the next piece, also as
        soon as nothing is under way."""
        self._due_bytes = window_bytes // 4
        self._is_narrow = window_bytes - self._due_bytes < MAX_PIECE_BYTES
        self._freed: deque[int] = deque()  # append and popleft are atomic
        self._pending = 0
        self._is_freed = Wakeup()

    def add(self, num_bytes: int) -> None:
        """From any thread."""
        self._freed.append(num_bytes)
        self._is_freed.call()

    async def next_credit(self, num_taken_bytes: Callable[[], int]) -> int:
        while True:
            while self._freed:
                self._pending += self._freed.popleft()
            if self._pending >= self._due_bytes or self._is_left_alone(num_taken_bytes()):
                credit, self._pending = self._pending, 0
                return credit
            self._is_freed.clear()
            if not self._freed:
                await self._is_freed.wait()

    def _is_left_alone(self, num_taken_bytes: int) -> bool:
        return self._is_narrow and self._pending > 0 and num_taken_bytes == 0
