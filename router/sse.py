"""Answers that follow their client: server-sent events, and work that ends when the client leaves."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import orjson
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from common.errors import ServingError
from router.openai_answers import JsonObject, error_body

logger = logging.getLogger(__name__)

T = TypeVar("T")

STALL_S = 5.0  # after its deadline a stream may still take this long to reach a slow client


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled, and waited for, as soon as the client leaves.

    receive: the request's channel, its body already read.
    Raises: ClientDisconnect.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


class EventStream(Response):
    """One event per object, then [DONE]. Owns `events` and closes it in every case.

    The status line waits for the first event, so a request that fails before it fails with its own status and body.
    An error after that becomes the last event.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[JsonObject, None], deadline_s: float) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["Content-Length"]
        self._events = events
        self._deadline_s = deadline_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientDisconnect):
            await unless_disconnected(receive, self._stream(send))

    async def _stream(self, send: Send) -> None:
        try:
            async with (
                asyncio.timeout(self._deadline_s + STALL_S - time.monotonic()) as timeout,
                aclosing(self._events),
            ):
                await self._send_all(send)
        except TimeoutError:
            if not timeout.expired():
                raise
            logger.warning("a client stopped reading its stream; the stream is cut")

    async def _send_all(self, send: Send) -> None:
        first = await anext(self._events)
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await _send_event(send, first)
        try:
            async for event in self._events:
                await _send_event(send, event)
        except ServingError as error:
            await _send_event(send, error_body(error))
        except Exception:  # the boundary of the process: the headers are out, the client must still get an answer
            logger.exception("an answer broke off")
            await _send_event(send, error_body(ServingError("internal error")))
        else:
            await _send(send, b"data: [DONE]\n\n")
        await send({"type": "http.response.body", "body": b""})


async def _send_event(send: Send, event: JsonObject) -> None:
    await _send(send, b"data: " + _json(event) + b"\n\n")


def _json(event: JsonObject) -> bytes:
    """ASCII only: some clients split lines at U+2028 and U+0085 too. orjson is the fast one, but cannot escape."""
    data = orjson.dumps(event)
    return data if data.isascii() else json.dumps(event, separators=(",", ":")).encode("ascii")


async def _send(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
