from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable

import pytest

from loadgen.progress import RunView
from loadgen.record import Delta, RequestRecord
from loadgen.runner import clock, run
from loadgen.trace import TraceRow
from loadgen.workload import ClosedLoop, LengthRange, PlannedRequest, Poisson, Replay, Workload

ANSWER = (Delta(num_tokens=1), Delta(num_tokens=1, is_end=True))


class ScriptedTarget:
    """Answers every request once `before(index)` returns."""

    label = "scripted"

    def __init__(self, before: Callable[[int], Awaitable[None]]) -> None:
        self._before = before
        self.num_started = 0
        self.num_active = 0
        self.most_active = 0

    async def connect(self) -> None: ...

    async def close(self) -> None: ...

    async def stream(self, request: PlannedRequest) -> AsyncGenerator[Delta, None]:
        index, self.num_started = self.num_started, self.num_started + 1
        self.num_active += 1
        self.most_active = max(self.most_active, self.num_active)
        try:
            await self._before(index)
            for delta in ANSWER:
                yield delta
        finally:
            self.num_active -= 1


async def records_of(workload: Workload, target: ScriptedTarget) -> list[RequestRecord]:
    view = RunView("scripted", workload.num_planned, clock)
    async with asyncio.timeout(10):
        await run(workload, target, 5.0, view)
    return view.records


async def yield_once(index: int) -> None:
    await asyncio.sleep(0)


async def test_a_closed_loop_keeps_exactly_its_concurrency_busy() -> None:
    workload = Workload(ClosedLoop(3), LengthRange(1, 1), num_requests=20)
    target = ScriptedTarget(yield_once)
    records = await records_of(workload, target)
    assert len(records) == 20
    assert all(record.is_completed for record in records)
    assert target.most_active == 3


async def test_an_open_loop_sends_whether_or_not_earlier_requests_were_answered() -> None:
    everyone_is_here = asyncio.Event()

    async def wait_for_all(index: int) -> None:
        if index == 7:
            everyone_is_here.set()
        await everyone_is_here.wait()

    target = ScriptedTarget(wait_for_all)
    records = await records_of(Workload(Poisson(math.inf), LengthRange(1, 1), num_requests=8), target)
    assert target.most_active == 8
    assert all(record.is_completed for record in records)


async def test_latency_counts_from_the_schedule_even_when_the_sending_was_held_up() -> None:
    """Coordinated omission: the second request was due while the first held up the whole process."""

    async def hold_up_everything(index: int) -> None:
        if index == 0:
            time.sleep(0.1)  # noqa: ASYNC251  the point of the test

    workload = Workload(Replay(), trace=(TraceRow(0.0, 1, 1), TraceRow(0.02, 1, 1)))
    first, second = await records_of(workload, ScriptedTarget(hold_up_everything))
    assert second.scheduled_s - first.scheduled_s == pytest.approx(0.02)
    assert second.sent_s - second.scheduled_s > 0.05
    assert second.ttft_s > 0.05


async def test_a_closed_loop_stops_sending_when_its_duration_is_over() -> None:
    async def answer_soon(index: int) -> None:
        await asyncio.sleep(0.01)

    workload = Workload(ClosedLoop(2), LengthRange(1, 1), duration_s=0.1)
    start_s = clock()
    records = await records_of(workload, ScriptedTarget(answer_soon))
    assert 2 <= len(records) <= 30
    assert all(record.is_completed and record.sent_s < start_s + 1.0 for record in records)


async def test_the_view_tells_counts_rate_and_latencies() -> None:
    now_s = 100.0
    view = RunView("scripted", 4, lambda: now_s)
    view.started()
    view.started()
    record = RequestRecord(0.0, 0.0, 10, 3)
    for moment_s in (0.5, 0.6, 0.7):
        record.note(Delta(num_tokens=1), moment_s)
    now_s = 102.0
    view.ended(record)
    assert view.line() == "1/4 done  1 in flight  0 failed  0.50 req/s  TTFT 500.0 ms  TPOT 100.0 ms"
    now_s = 113.0  # the record left the window
    assert view.line() == "1/4 done  1 in flight  0 failed  0.00 req/s  TTFT –  TPOT –"
