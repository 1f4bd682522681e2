"""uvicorn inside our own process: it neither takes the signals nor hides when it is ready."""

from __future__ import annotations

import asyncio
import math
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

import h11
import uvicorn
from fastapi import FastAPI
from starlette.responses import Response
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from common.errors import InvalidRequest
from router.http_errors import error_response, request_timeout

STOP_GRACE_S = 1
MAX_HEADERS_BYTES = 32 * 1024  # request line and headers together
HEAD_TIMEOUT_S = 20.0  # for request line and headers to arrive, from the connection or the last answer on
LINGER_S = 2.0  # how long a client whose body was refused may go on sending it before it reads the answer


class HttpServer(uvicorn.Server):
    """Serves an app on a socket that is already bound. `is_ready` is set once it accepts connections."""

    def __init__(self, app: FastAPI, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=GuardedH11Protocol,
                ws="none",
                h11_max_incomplete_event_size=MAX_HEADERS_BYTES,
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=STOP_GRACE_S,
                lifespan="off",
                ssl_context_factory=None if tls is None else lambda _, __: tls,
            )
        )
        self.is_ready = asyncio.Event()

    def begin_shutdown(self, grace_s: float) -> None:
        """Accept no new connections, and end those that are open with the answers that run on them."""
        self.config.timeout_graceful_shutdown = math.ceil(grace_s)
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_ready.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """common/process.py has them."""
        yield


class GuardedH11Protocol(H11Protocol):
    """For what the app never sees: no HTTP at all, too many headers, none, a body that goes on after its refusal."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._give_up_on_head)

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_timer.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """In the app's shape too."""
        self._refuse(error_response(InvalidRequest(f"{msg} {_LIMITS}")))

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._head_timer.cancel()
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._give_up_on_head)
        if self.conn.their_state is h11.SEND_BODY:
            self.loop.call_later(LINGER_S, self._close_if_still_sending, self.cycle)

    def _give_up_on_head(self) -> None:
        """Half a head gets an answer, since somebody waits for one."""
        if self.conn.their_state is not h11.IDLE:
            return  # there was a whole one; the app has it
        if self.conn.trailing_data[0]:
            self._refuse(request_timeout(f"The request did not arrive within {HEAD_TIMEOUT_S:g} s. {_LIMITS}"))
        else:
            self.transport.close()

    def _refuse(self, response: Response) -> None:
        headers = [*response.raw_headers, (b"connection", b"close")]
        body = h11.Data(data=bytes(response.body))
        for event in (h11.Response(status_code=response.status_code, headers=headers), body, h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _close_if_still_sending(self, cycle: RequestResponseCycle) -> None:
        if self.cycle is cycle and self.conn.their_state is h11.SEND_BODY:
            self.transport.close()


_LIMITS = f"Its first line and headers may have {MAX_HEADERS_BYTES} bytes."
