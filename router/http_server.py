"""uvicorn inside our own process: it neither takes the signals nor hides when it is ready."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from common.errors import InvalidRequest
from router.http_errors import error_response

STOP_GRACE_S = 1
MAX_HEADERS_BYTES = 32 * 1024  # request line and headers together


class HttpServer(uvicorn.Server):
    """Serves an app on a socket that is already bound. `is_ready` is set once it accepts connections."""

    def __init__(self, app: FastAPI) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=TypedH11Protocol,
                h11_max_incomplete_event_size=MAX_HEADERS_BYTES,
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=STOP_GRACE_S,
                lifespan="off",
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


class TypedH11Protocol(H11Protocol):
    """What is no HTTP, or has too many headers, is refused before the app sees it; in the app's shape all the same."""

    def send_400_response(self, msg: str) -> None:
        body = error_response(InvalidRequest(f"{msg} Request line and headers have at most {MAX_HEADERS_BYTES} bytes."))
        headers = [*body.raw_headers, (b"connection", b"close")]
        for event in (
            h11.Response(status_code=400, headers=headers),
            h11.Data(data=bytes(body.body)),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
