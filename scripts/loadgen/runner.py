"""Sends a workload at a target, and turns every request into a record."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import aclosing
from typing import Protocol

from common.process import freeze_heap
from loadgen.record import RequestFailed, RequestRecord, Target
from loadgen.workload import ClosedLoop, PlannedRequest, Workload, plan

clock = time.perf_counter


class Watcher(Protocol):
    """Sees requests start and end, as they do."""

    def started(self) -> None: ...

    def ended(self, record: RequestRecord) -> None: ...


async def run(workload: Workload, target: Target, timeout_s: float, watcher: Watcher) -> None:
    """Send the whole workload and wait for every answer; `watcher` gets the records."""
    freeze_heap()  # a pause of this process would look like one of the server's
    match workload.pacing:
        case ClosedLoop(concurrency):
            requests = plan(workload)
            stop_s = clock() + workload.duration_s if workload.duration_s is not None else None
            async with asyncio.TaskGroup() as clients:
                for _ in range(concurrency):
                    clients.create_task(_closed_loop(requests, target, timeout_s, stop_s, watcher))
        case _:
            await _open_loop(plan(workload), target, timeout_s, watcher)


async def _open_loop(requests: Iterator[PlannedRequest], target: Target, timeout_s: float, watcher: Watcher) -> None:
    start_s = clock()
    async with asyncio.TaskGroup() as in_flight:
        for request in requests:
            scheduled_s = start_s + request.arrival_s
            await asyncio.sleep(scheduled_s - clock())
            in_flight.create_task(_measure_and_tell(request, target, scheduled_s, timeout_s, watcher))


async def _closed_loop(
    requests: Iterator[PlannedRequest], target: Target, timeout_s: float, stop_s: float | None, watcher: Watcher
) -> None:
    for request in requests:
        if stop_s is not None and clock() >= stop_s:
            return
        await _measure_and_tell(request, target, clock(), timeout_s, watcher)


async def _measure_and_tell(
    request: PlannedRequest, target: Target, scheduled_s: float, timeout_s: float, watcher: Watcher
) -> None:
    watcher.started()
    watcher.ended(await measure(request, target, scheduled_s, timeout_s))


async def measure(request: PlannedRequest, target: Target, scheduled_s: float, timeout_s: float) -> RequestRecord:
    """One request, from its schedule to its record. Never raises for what the server does."""
    record = RequestRecord(scheduled_s, clock(), request.input_tokens, request.output_tokens)
    try:
        async with asyncio.timeout(timeout_s), aclosing(target.stream(request)) as deltas:
            async for delta in deltas:
                record.note(delta, clock())
        if record.output_tokens == 0:
            raise RequestFailed("empty answer", "the stream ended well, but without a token")
    except RequestFailed as failure:
        record.failure, record.end_s = failure, clock()
    except TimeoutError:
        record.failure, record.end_s = RequestFailed("timeout", f"no whole answer within {timeout_s:g} s"), clock()
    return record
