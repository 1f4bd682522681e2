"""How other threads tell a task of the event loop that there is something for it, often and cheaply."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress


class Wakeup:
    """Made and waited for on one event loop. Many calls cost one round of the loop, not a system call each."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._is_called = asyncio.Event()
        self._is_on_its_way = False

    def call(self) -> None:
        """From any thread, after making what `wait` returns for visible."""
        if threading.get_ident() == self._loop_thread:
            self._is_called.set()
        elif not self._is_on_its_way:
            self._is_on_its_way = True
            with suppress(RuntimeError):  # the loop is gone, and with it whoever waited
                self._loop.call_soon_threadsafe(self._arrive)

    def clear(self) -> None:
        """Before looking a last time and then waiting."""
        self._is_called.clear()

    async def wait(self) -> None:
        await self._is_called.wait()

    def _arrive(self) -> None:
        self._is_on_its_way = False  # first: whoever found it set had made everything visible by then
        self._is_called.set()
