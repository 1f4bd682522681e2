"""A lean client of the OpenAI API: it must cost far less than the router that it measures.

Keeps connections open, counts events as they come and reads only the last ones: JSON escapes line feeds, so an empty
line is always the end of an event, and chunked framing has none of its own.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from typing import Any

from routerbench.answer import Answer, AnswerFailed, Question

OK = b"HTTP/1.1 200"
END_OF_HEAD = b"\r\n\r\n"
END_OF_BODY = b"\r\n0\r\n\r\n"
END_OF_EVENT = b"\n\n"
DONE = b"data: [DONE]\n\n"
NUM_CLOSING_EVENTS = 2  # the usage and [DONE]


class HttpClient:
    """Asks for streams of one model."""

    def __init__(self, url: str, model: str) -> None:
        self._host, _, port = url.removeprefix("http://").rpartition(":")
        self._port = int(port)
        self._model = model
        self._idle: list[_Connection] = []
        self._all: list[_Connection] = []

    async def ask(self, question: Question) -> Answer:
        connection = await self._connection()
        answer = Answer(secrets.token_hex(8), 0.0)
        head = self._head(question, answer.request_id)
        answer.start_s = time.monotonic()
        body = await connection.exchange(head, answer)
        answer.num_tokens = _usage(body)["completion_tokens"]
        self._idle.append(connection)  # not after an error, whose body may still be on its way
        del answer.event_s[-NUM_CLOSING_EVENTS:]
        answer.require_tokens(question.num_tokens)
        return answer

    async def close(self) -> None:
        for connection in self._all:
            connection.transport.close()

    async def _connection(self) -> _Connection:
        """One that is open: the router closes those that were idle for some seconds."""
        loop = asyncio.get_running_loop()
        while self._idle:
            if not (connection := self._idle.pop()).transport.is_closing():
                return connection
        _, connection = await loop.create_connection(_Connection, self._host, self._port)
        self._all.append(connection)
        return connection

    def _head(self, question: Question, request_id: str) -> bytes:
        body = json.dumps(
            {
                "model": self._model,
                "prompt": question.text,
                "max_tokens": question.num_tokens,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        lines = (
            "POST /v1/completions HTTP/1.1",
            f"Host: {self._host}:{self._port}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            f"X-Request-Id: {request_id}",
        )
        return "\r\n".join(lines).encode() + END_OF_HEAD + body


class _Connection(asyncio.Protocol):
    """One exchange at a time."""

    transport: asyncio.Transport
    _answer: Answer
    _received: list[bytes]
    _last: bytes
    _whole: asyncio.Future[bytes]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    async def exchange(self, request: bytes, answer: Answer) -> bytes:
        """The answer's bytes, head and framing included. Raises: ConnectionError."""
        self._answer = answer
        self._received, self._last = [], b""
        self._whole = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        try:
            return await self._whole
        except asyncio.CancelledError:
            self.transport.abort()
            raise

    def data_received(self, data: bytes) -> None:
        if self._whole.done():
            return
        now = time.monotonic()
        self._received.append(data)
        # an empty line, or the end of the body, may lie across two reads
        num_events = (self._last[-1:] + data).count(END_OF_EVENT)
        self._answer.event_s += [now] * num_events
        self._last = (self._last + data)[-len(END_OF_BODY) :]
        if self._last == END_OF_BODY or not self._received[0].startswith(OK):  # an error's body is framed otherwise
            self._whole.set_result(b"".join(self._received))

    def connection_lost(self, error: Exception | None) -> None:
        if not self._whole.done():  # else it was idle
            self._whole.set_exception(error or ConnectionError("the router closed the connection"))


def _usage(body: bytes) -> dict[str, Any]:
    """Of a whole answer. Raises: AnswerFailed."""
    head, _, rest = body.partition(END_OF_HEAD)
    if not head.startswith(OK) or DONE not in rest:
        raise AnswerFailed(body[-500:].decode(errors="replace"))
    event = json.loads(rest[rest.rindex(b"data: {") + 6 : rest.rindex(DONE)].partition(END_OF_EVENT)[0])
    usage: dict[str, Any] = event["usage"]
    return usage


def texts(body: bytes) -> list[str]:
    """The text of each event of a whole answer."""
    events = [part.rpartition(b"data: ")[2] for part in body.split(END_OF_EVENT) if b"data: {" in part]
    return [choice["text"] for event in events for choice in json.loads(event)["choices"]]
