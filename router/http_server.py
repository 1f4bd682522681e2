"""uvicorn inside our own process: it neither takes the signals nor hides when it is ready."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

STOP_GRACE_S = 1


class HttpServer(uvicorn.Server):
    """Serves an app on a socket that is already bound. `is_ready` is set once it accepts connections."""

    def __init__(self, app: FastAPI) -> None:
        super().__init__(
            uvicorn.Config(
                app, log_config=None, access_log=False, timeout_graceful_shutdown=STOP_GRACE_S, lifespan="off"
            )
        )
        self.is_ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_ready.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """common/process.py has them."""
        yield
