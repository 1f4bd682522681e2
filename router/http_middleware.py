"""What every HTTP request passes through: it gets an id, and its body has a limit.

Plain ASGI: nothing here may stand between a client's departure and the work done for it.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "X-Request-Id"

_SANE = re.compile(r"[A-Za-z0-9._-]{1,64}")


class RequestIdMiddleware:
    """Sets `request.state.request_id`, the client's own when it sends a sane one, and returns it in X-Request-Id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        request_id = given if _SANE.fullmatch(given) else secrets.token_hex(12)
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


@dataclass(frozen=True)
class BodyLimits:
    max_bytes: Callable[[], int]  # of one body
    max_total_bytes: int  # of all that are held at once, each for as long as its request lasts
    timeout_s: float  # for a whole body to arrive


class BodyLimitMiddleware:
    """Refuses a body by the size that it announces, or stops reading it.

    Raises: HTTPException 400, 408, 413, 415, 429, inside the app, so it has the app's shape.
    """

    def __init__(self, app: ASGIApp, limits: BodyLimits) -> None:
        self._app = app
        self._limits = limits
        self._total_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(receive, self._limits, Headers(scope=scope))
        num_counted = 0

        async def limited_receive() -> Message:
            nonlocal num_counted
            message = await body.receive()
            num_bytes = len(message.get("body", b""))
            if self._total_bytes + num_bytes > self._limits.max_total_bytes:
                raise HTTPException(429, "too many large bodies are being read; retry later")
            self._total_bytes += num_bytes
            num_counted += num_bytes
            return message

        try:
            await self._app(scope, limited_receive, send)
        finally:
            self._total_bytes -= num_counted


class _Body:
    """One request's body on its way in. What comes after it, the client's departure, may take any time."""

    def __init__(self, receive: Receive, limits: BodyLimits, headers: Headers) -> None:
        self._receive = receive
        self._headers = headers
        self._limits = limits
        self._max_bytes = limits.max_bytes()
        self._deadline_s = asyncio.get_running_loop().time() + limits.timeout_s
        self._num_bytes = 0
        self._is_complete = False

    async def receive(self) -> Message:
        if self._is_complete:
            return await self._receive()
        _require_plain(self._headers)
        self._require_small(_announced_bytes(self._headers))
        try:
            async with asyncio.timeout_at(self._deadline_s):
                message = await self._receive()
        except TimeoutError:
            raise HTTPException(408, f"the body did not arrive within {self._limits.timeout_s:g} s") from None
        self._num_bytes += len(message.get("body", b""))
        self._require_small(self._num_bytes)
        self._is_complete = not message.get("more_body", False)
        return message

    def _require_small(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise HTTPException(413, f"the body is larger than {self._max_bytes} bytes")


def _require_plain(headers: Headers) -> None:
    """A body that another server on the way may see end elsewhere (request smuggling, RFC 9112), or that is packed."""
    if "Content-Length" in headers and "Transfer-Encoding" in headers:
        message = "a request has a Content-Length or a Transfer-Encoding, not both"
        raise HTTPException(400, message, {"Connection": "close"})
    if headers.get("Content-Encoding", "identity") != "identity":
        raise HTTPException(415, f"Content-Encoding {headers['Content-Encoding']!r} is not supported; send plain JSON")


def _announced_bytes(headers: Headers) -> int:
    given = headers.get("Content-Length", "")
    # of more digits the first ones are too many already; without any the body comes in chunks, and is counted
    return int(given[:20]) if given.isascii() and given.isdigit() else 0
