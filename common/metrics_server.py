"""GET /metrics of a process that serves nothing else over HTTP. A few lines of HTTP/1.1 in place of a web framework:
one request for each connection, few connections, little patience. Nothing that is served here is secret."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress

from prometheus_client import CONTENT_TYPE_LATEST

from common.errors import ConfigError

MAX_HEAD_BYTES = 16 * 1024  # request line and headers
MAX_CONNECTIONS = 16  # beyond them callers are hung up on
TIMEOUT_S = 10.0  # from the connection to the end of its answer

Render = Callable[[], Awaitable[bytes]]


class MetricsServer:
    """Bound when it is made, so that its address can be told before it serves."""

    def __init__(self, host: str, port: int, key: str) -> None:
        """port: 0 takes a free one. key: of serve.yaml, for the message. Raises: ConfigError when it is taken."""
        host = host.strip("[]")
        is_v6 = ":" in host
        try:
            self._socket = socket.create_server((host, port), family=socket.AF_INET6 if is_v6 else socket.AF_INET)
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; choose another {key}") from error
        self.address = f"{f'[{host}]' if is_v6 else host}:{self._socket.getsockname()[1]}"
        self._server: asyncio.Server | None = None
        self._num_connections = 0

    async def start(self, render: Render) -> None:
        """render: the metrics as they are now, in Prometheus' text format."""

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._answer(reader, writer, render)

        self._server = await asyncio.start_server(answer, sock=self._socket, limit=MAX_HEAD_BYTES)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        self._socket.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, render: Render) -> None:
        self._num_connections += 1
        try:
            if self._num_connections <= MAX_CONNECTIONS:
                # it is too slow, or gone, or speaks no HTTP
                with suppress(TimeoutError, ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                    async with asyncio.timeout(TIMEOUT_S):
                        head = await reader.readuntil(b"\r\n\r\n")
                        writer.write(await _response(head, render))
                        await writer.drain()
        finally:
            self._num_connections -= 1
            writer.close()


async def _response(head: bytes, render: Render) -> bytes:
    method, _, rest = head.partition(b" ")
    path = rest.partition(b" ")[0].partition(b"?")[0]
    if path != b"/metrics":
        return _message("404 Not Found", "text/plain", b"there is only /metrics\n")
    if method not in (b"GET", b"HEAD"):
        return _message("405 Method Not Allowed", "text/plain", b"GET it\n")
    whole = _message("200 OK", CONTENT_TYPE_LATEST, await render())
    return whole if method == b"GET" else whole.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"


def _message(status: str, content_type: str, body: bytes) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode("ascii") + body
