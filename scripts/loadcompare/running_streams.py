"""What running streams feel of other people's prompts: their gaps alone, then while long prompts arrive beside them.

idle    4 streams  ············································  10 s
loaded  4 streams  ·····|·········|·········|·········|·········  until the last prompt (|, every 3 s) is answered
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise

from loadgen.progress import RunView
from loadgen.record import RequestRecord, Target
from loadgen.results import Gap, StreamsRun
from loadgen.runner import clock, run
from loadgen.workload import ClosedLoop, Constant, LengthRange, PlannedRequest, Workload, plan

FIRST_TOKENS_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Scenario:
    num_streams: int = 4
    stream_input_tokens: int = 64
    stream_output_tokens: int = 1400  # long enough that few of them end and are replaced
    idle_s: float = 10.0
    num_prompts: int = 8
    prompt_tokens: int = 1500
    prompt_output_tokens: int = 8
    prompt_every_s: float = 3.0
    vocab_size: int = Workload.vocab_size
    seed: int = 500


async def measure_streams(scenario: Scenario, target: Target, timeout_s: float) -> StreamsRun:
    """Raises: RequestFailed when a stream breaks, TimeoutError when they do not begin."""
    prompts = RunView(target.label, scenario.num_prompts, clock)
    workload = Workload(
        pacing=Constant(1 / scenario.prompt_every_s),
        input_tokens=_exactly(scenario.prompt_tokens),
        output_tokens=_exactly(scenario.prompt_output_tokens),
        vocab_size=scenario.vocab_size,
        num_requests=scenario.num_prompts,
        seed=scenario.seed,
    )
    idle, _ = await _gaps_during(
        lambda: asyncio.sleep(scenario.idle_s), replace(scenario, seed=scenario.seed + 1), target
    )
    loaded, start_s = await _gaps_during(
        lambda: run(workload, target, timeout_s, prompts), replace(scenario, seed=scenario.seed + 2), target
    )
    records: list[RequestRecord] = sorted(prompts.records, key=lambda record: record.scheduled_s)
    arrivals_s = [record.scheduled_s - start_s for record in records]
    return StreamsRun(target.label, scenario.num_streams, idle, loaded, records, arrivals_s)


async def _gaps_during(
    phase: Callable[[], Awaitable[None]], scenario: Scenario, target: Target
) -> tuple[list[Gap], float]:
    """The gaps that ended during the phase, and when it began."""
    async with _running(scenario, target) as streams:
        start_s = clock()
        await phase()
        end_s = clock()
        gaps = [
            Gap(later - start_s, later - earlier)
            for token_s in streams.token_s
            for earlier, later in pairwise(token_s)
            if start_s < later <= end_s
        ]
    return gaps, start_s


@dataclass
class _Streams:
    token_s: list[list[float]] = field(default_factory=list)  # of each stream, also of those that ended
    num_running: int = 0
    all_run: asyncio.Event = field(default_factory=asyncio.Event)


@asynccontextmanager
async def _running(scenario: Scenario, target: Target) -> AsyncIterator[_Streams]:
    """So many streams, all past their first token. One that ends is replaced; all are cancelled in the end."""
    streams = _Streams()
    requests = plan(
        Workload(
            pacing=ClosedLoop(scenario.num_streams),
            input_tokens=_exactly(scenario.stream_input_tokens),
            output_tokens=_exactly(scenario.stream_output_tokens),
            vocab_size=scenario.vocab_size,
            seed=scenario.seed,
        )
    )

    async def keep_one_running() -> None:
        for request in requests:
            await _follow(request, target, streams, scenario.num_streams)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(keep_one_running()) for _ in range(scenario.num_streams)]
            async with asyncio.timeout(FIRST_TOKENS_TIMEOUT_S):
                await streams.all_run.wait()
            yield streams
            for task in tasks:
                task.cancel()
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def _follow(request: PlannedRequest, target: Target, streams: _Streams, num_wanted: int) -> None:
    token_s: list[float] = []
    streams.token_s.append(token_s)
    try:
        async with aclosing(target.stream(request)) as deltas:
            async for delta in deltas:
                if not delta.num_tokens:
                    continue
                token_s.append(clock())
                if len(token_s) == 1:
                    streams.num_running += 1
                    if streams.num_running == num_wanted:
                        streams.all_run.set()
    finally:
        if token_s:
            streams.num_running -= 1


def _exactly(num_tokens: int) -> LengthRange:
    return LengthRange(num_tokens, num_tokens)
