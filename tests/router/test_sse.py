from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Message

from router.sse import STALL_S, EventStream, unless_disconnected

SCOPE = {"type": "http"}


async def never() -> Any:
    await asyncio.Event().wait()


async def disconnect() -> Message:
    return {"type": "http.disconnect"}


class Events:
    """Two events; knows whether it was closed."""

    def __init__(self) -> None:
        self.is_closed = False

    async def __call__(self) -> AsyncGenerator[dict[str, Any], None]:
        try:
            yield {"n": 1}
            yield {"n": "\u2028"}
        finally:
            self.is_closed = True


async def test_a_stream_is_ascii_so_that_no_client_splits_a_line_inside_an_event() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    await EventStream(Events()(), time.monotonic() + 60)(SCOPE, never, send)
    start, *bodies = sent
    assert start["status"] == 200
    assert (b"content-type", b"text/event-stream; charset=utf-8") in start["headers"]
    body = b"".join(message["body"] for message in bodies)
    assert body == b'data: {"n":1}\n\ndata: {"n":"\\u2028"}\n\ndata: [DONE]\n\n'
    assert bodies[0]["body"] == b'data: {"n":1}\n\n'  # the first event leaves alone, at once
    assert not bodies[-1].get("more_body", False)


async def test_a_client_that_stops_reading_loses_its_stream_soon_after_the_deadline() -> None:
    events = Events()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            await never()

    stream = EventStream(events(), time.monotonic() - STALL_S + 0.05)
    await asyncio.wait_for(stream(SCOPE, never, send), 5)
    assert events.is_closed


async def test_a_client_that_leaves_ends_the_stream_and_its_events() -> None:
    events = Events()

    async def send(message: Message) -> None:
        await never()

    await asyncio.wait_for(EventStream(events(), time.monotonic() + 60)(SCOPE, disconnect, send), 5)
    assert events.is_closed


async def test_work_is_over_before_the_departure_is_reported() -> None:
    is_cleaned_up = False

    async def work() -> None:
        nonlocal is_cleaned_up
        try:
            await never()
        finally:
            await asyncio.sleep(0)
            is_cleaned_up = True

    started = asyncio.Event()

    async def leave_once_started() -> Message:
        await started.wait()
        return await disconnect()

    async def started_work() -> None:
        started.set()
        await work()

    with pytest.raises(ClientDisconnect):
        await unless_disconnected(leave_once_started, started_work())
    assert is_cleaned_up


async def test_cancelling_the_caller_cancels_the_work() -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        started.set()
        try:
            await never()
        finally:
            ended.set()

    waiting = asyncio.create_task(unless_disconnected(never, work()))
    await asyncio.wait_for(started.wait(), 5)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended.is_set()
