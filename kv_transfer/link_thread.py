"""A thread of one link, for calls that block in a socket."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress


class LinkThread:
    """Made and joined on one event loop. `run` ends when the socket that it blocks in is shut down."""

    def __init__(self, name: str, run: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._run = run
        self._has_ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run_to_the_end, name=name, daemon=True)
        self._thread.start()

    async def join(self) -> None:
        await self._has_ended.wait()
        self._thread.join()  # it has nothing left to do

    def _run_to_the_end(self) -> None:
        try:
            self._run()
        finally:
            with suppress(RuntimeError):  # the loop is gone, and with it whoever would have waited
                self._loop.call_soon_threadsafe(self._has_ended.set)
