"""No new work, the old one ends or is ended, and then it is over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from common.drain import Drain
from common.errors import WorkerDraining


async def events(until: asyncio.Event) -> AsyncGenerator[str, None]:
    yield "begun"
    await until.wait()
    yield "done"


async def worked(drain: Drain, until: asyncio.Event) -> str:
    async with aclosing(drain.work(events(until))) as seen:
        return [event async for event in seen][-1]


async def begun(*tasks: asyncio.Task[str]) -> None:
    for _ in range(3):
        await asyncio.sleep(0)
    assert not any(task.done() for task in tasks)


async def test_what_runs_may_end_and_new_work_is_refused() -> None:
    drain, gate = Drain("decode-0", timeout_s=60), asyncio.Event()
    running = asyncio.create_task(worked(drain, gate))
    ended = asyncio.create_task(drain.ended())
    await begun(running)
    assert not drain.is_draining
    drain.begin()
    assert drain.is_draining
    with pytest.raises(WorkerDraining, match="takes no new work"):
        await worked(drain, gate)
    assert not ended.done()
    gate.set()
    assert await running == "done"
    await asyncio.wait_for(ended, 5)


async def test_what_still_runs_at_the_bound_ends_with_a_typed_error() -> None:
    drain = Drain("decode-0", timeout_s=60)
    running = [asyncio.create_task(worked(drain, asyncio.Event())) for _ in range(3)]
    await begun(*running)
    drain.begin(timeout_s=0.0)
    for task in running:
        with pytest.raises(WorkerDraining, match="goes on elsewhere"):
            await asyncio.wait_for(task, 5)
    await asyncio.wait_for(drain.ended(), 5)


async def test_the_most_urgent_wish_counts() -> None:
    drain = Drain("decode-0", timeout_s=60)
    running = asyncio.create_task(worked(drain, asyncio.Event()))
    await begun(running)
    drain.begin()
    ended = asyncio.create_task(drain.ended())
    await begun(running)
    drain.begin(timeout_s=0.0)
    drain.begin(timeout_s=60)
    with pytest.raises(WorkerDraining):
        await asyncio.wait_for(running, 5)
    await asyncio.wait_for(ended, 5)


async def test_an_idle_worker_leaves_at_once_and_a_call_that_is_cancelled_counts_no_more() -> None:
    drain = Drain("decode-0", timeout_s=60)
    running = asyncio.create_task(worked(drain, asyncio.Event()))
    await begun(running)
    running.cancel()
    await asyncio.wait({running})
    assert running.cancelled()
    drain.begin()
    await asyncio.wait_for(drain.ended(), 5)


async def test_a_timeout_of_the_work_itself_keeps_its_type() -> None:
    async def slow() -> AsyncGenerator[str, None]:
        yield "begun"
        raise TimeoutError

    with pytest.raises(TimeoutError):
        [event async for event in Drain("decode-0", timeout_s=60).work(slow())]


async def test_a_call_that_is_sending_when_the_bound_passes_is_ended_at_its_next_event_and_not_cancelled() -> None:
    drain = Drain("decode-0", timeout_s=60)
    async with aclosing(drain.work(events(asyncio.Event()))) as seen:
        assert await anext(seen) == "begun"
        drain.begin(timeout_s=0.0)
        await asyncio.sleep(0.01)  # sending
        with pytest.raises(WorkerDraining):
            await anext(seen)
    await asyncio.wait_for(drain.ended(), 5)


async def test_a_call_that_always_has_an_event_ready_ends_at_the_bound_too() -> None:
    async def endless() -> AsyncGenerator[int, None]:
        while True:
            yield 1

    drain = Drain("decode-0", timeout_s=60)
    async with aclosing(drain.work(endless())) as seen:
        await anext(seen)
        drain.begin(timeout_s=0.0)
        with pytest.raises(WorkerDraining):
            await anext(seen)
