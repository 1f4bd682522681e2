"""One system after the other: how much it serves within its objectives, and what long prompts do to its streams."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, get_args

import numpy as np

from cluster.plan import Plan
from common.config import ServeConfig
from loadgen.grpc_target import GrpcTarget
from loadgen.record import RequestRecord
from loadgen.runner import clock, measure, run
from loadgen.slo import Slo, attainment, num_good
from loadgen.sweep import Search, find_highest_rate
from loadgen.trace import TraceRow
from loadgen.workload import Constant, LengthRange, Poisson, Workload, plan
from placementbench.figures import Figure
from placementbench.systems import Configuration, plan_for
from servingbench.system import run_system, until_ready

Part = Literal["rate", "overload", "interference"]
PARTS: tuple[Part, ...] = get_args(Part)

SLO = Slo(ttft_s=3.0, tpot_s=0.15)
SEARCH = Search(goal=0.9, first_rate=2.4, max_runs=5, precision=1.1)
RATE_GOAL = 1.2  # requests/s for auto
OVERLOAD = 3.0  # times the highest rate
GOODPUT_GOAL = 0.9  # of the highest rate's
REFUSAL_GOAL_S = 0.05
INTERFERENCE_GOAL = 1.3  # ITL p99, times idle

NUM_STREAMS, STREAM_PROMPT_TOKENS, STREAM_OUTPUT_TOKENS = 4, 64, 1200
LONG_PROMPT_TOKENS, LONG_OUTPUT_TOKENS, LONG_EVERY_S = 1500, 16, 3.0

READY_TIMEOUT_S, REQUEST_TIMEOUT_S = 120.0, 120.0
SETTLE_S = 6.0  # decode workers wait as long for prefill workers before they compute prompts
WARM_UP_RATE, WARM_UP_S = 1.0, 8.0


Measure = Callable[["Configuration", GrpcTarget], Awaitable[list[Figure]]]


class Records:
    """A Watcher that keeps what it sees."""

    def __init__(self) -> None:
        self.all: list[RequestRecord] = []

    def started(self) -> None:
        pass

    def ended(self, record: RequestRecord) -> None:
        self.all.append(record)


@dataclass(frozen=True)
class Bench:
    config: ServeConfig
    rows: Sequence[TraceRow]
    seconds: float  # of each rate
    say: Callable[[str], None]
    best: dict[Configuration, tuple[float, float]] = field(default_factory=dict)  # highest rate and its goodput

    async def run(self, configurations: Sequence[Configuration], parts: Sequence[Part], figures: list[Figure]) -> None:
        """Appends figures as they come. Raises: ConfigError, MemberGivenUp, Unreachable, TimeoutError."""
        for configuration in configurations:
            if "rate" in parts:
                await self._on_system(configuration, SLO.ttft_s, self._rate, figures)
            if "overload" in parts and configuration in self.best:
                await self._on_system(configuration, SLO.ttft_s, self._overload, figures)
            if "interference" in parts:
                await self._on_system(configuration, None, self._interference, figures)

    async def _on_system(
        self, configuration: Configuration, max_ttft_s: float | None, measure_part: Measure, figures: list[Figure]
    ) -> None:
        plan = plan_for(configuration, self.config, max_ttft_s)

        async def work(plan: Plan) -> None:
            await until_ready(plan, READY_TIMEOUT_S)
            await asyncio.sleep(SETTLE_S)
            target = GrpcTarget(plan.grpc_address)
            await target.connect()
            try:
                await self._send(target, WARM_UP_RATE, WARM_UP_S)
                figures.extend(await measure_part(configuration, target))
            finally:
                await target.close()

        with TemporaryDirectory(prefix="pdserve-bench-") as folder:
            await run_system(plan, Path(folder), work)

    async def _rate(self, configuration: Configuration, target: GrpcTarget) -> list[Figure]:
        goodput: dict[float, float] = {}

        async def attainment_at(rate: float) -> float:
            records = await self._send(target, rate, self.seconds)
            share = attainment(records, SLO)
            goodput[rate] = num_good(records, SLO) / self.seconds
            ttft, tpot = _percentiles(records)
            self.say(
                f"{configuration}: {rate:.2f} req/s, attainment {share:.2f}, TTFT p90 {ttft:.2f} s, TPOT {tpot:.3f} s"
            )
            return share

        sweep = await find_highest_rate(attainment_at, SEARCH)
        rate = sweep.highest_rate or 0.0
        self.best[configuration] = rate, goodput.get(rate, 0.0)
        goal = RATE_GOAL if configuration == "auto" else None
        return [
            Figure(configuration, "highest rate at 90 % attainment", rate, "req/s", at_least=goal),
            Figure(configuration, "goodput at that rate", goodput.get(rate, 0.0), "req/s"),
        ]

    async def _overload(self, configuration: Configuration, target: GrpcTarget) -> list[Figure]:
        rate, peak = self.best[configuration]
        records = await self._send(target, OVERLOAD * rate, self.seconds)
        refusals_s = [record.end_s - record.sent_s for record in records if record.failure and record.end_s is not None]
        admitted = [record for record in records if record.is_completed]
        share = num_good(records, SLO) / self.seconds / peak
        self.say(f"{configuration}: {OVERLOAD * rate:.2f} req/s, {len(admitted)} of {len(records)} admitted")
        return [
            Figure(configuration, "goodput at 3 × the rate, of the peak", share, "", at_least=GOODPUT_GOAL),
            Figure(configuration, "attainment of admitted requests", attainment(admitted, SLO), ""),
            Figure(configuration, "refused after, p50", float(np.quantile(refusals_s, 0.5)) * 1e3, "ms"),
            Figure(
                configuration,
                "refused after, p95",
                float(np.quantile(refusals_s, 0.95)) * 1e3,
                "ms",
                at_most=REFUSAL_GOAL_S * 1e3,
            ),
        ]

    async def _interference(self, configuration: Configuration, target: GrpcTarget) -> list[Figure]:
        """Four streams run all the time; long prompts arrive in the second half of it."""
        streams = Workload(
            Poisson(float("inf")),
            LengthRange(STREAM_PROMPT_TOKENS, STREAM_PROMPT_TOKENS),
            LengthRange(STREAM_OUTPUT_TOKENS, STREAM_OUTPUT_TOKENS),
            num_requests=NUM_STREAMS,
            seed=1,
        )
        idle = await self._stream_gaps(target, streams)
        disturbed = asyncio.create_task(self._stream_gaps(target, streams, skip_s=1.0))
        disturber = asyncio.create_task(self._long_prompts(target, until=disturbed))
        await asyncio.wait({disturbed, disturber})
        long_ttft_s = disturber.result()
        idle_p99, p99 = float(np.quantile(idle, 0.99)), float(np.quantile(disturbed.result(), 0.99))
        goal = INTERFERENCE_GOAL if configuration in ("auto", "always") else None
        return [
            Figure(configuration, "ITL p99 of 4 streams alone", idle_p99 * 1e3, "ms"),
            Figure(configuration, "ITL p99 beside 1,500-token prompts", p99 * 1e3, "ms"),
            Figure(configuration, "the second, times the first", p99 / idle_p99, "", at_most=goal),
            Figure(configuration, "TTFT p50 of those prompts", float(np.median(long_ttft_s)), "s"),
        ]

    async def _stream_gaps(self, target: GrpcTarget, streams: Workload, skip_s: float = 0.0) -> list[float]:
        """skip_s: from the start, while they get their first tokens."""
        watcher = Records()
        await run(streams, target, REQUEST_TIMEOUT_S, watcher)
        start_s = min(record.sent_s for record in watcher.all) + max(skip_s, 1.0)
        gaps: list[float] = []
        for record in watcher.all:
            times = [at_s for at_s in record.token_event_s if at_s >= start_s]
            gaps += np.diff(times).tolist()
        return gaps

    async def _long_prompts(self, target: GrpcTarget, until: asyncio.Task[list[float]]) -> list[float]:
        """One every few seconds for as long as the task runs; their TTFT."""
        workload = Workload(
            Constant(1 / LONG_EVERY_S),
            LengthRange(LONG_PROMPT_TOKENS, LONG_PROMPT_TOKENS),
            LengthRange(LONG_OUTPUT_TOKENS, LONG_OUTPUT_TOKENS),
            num_requests=1000,
            seed=2,
        )
        start_s, tasks = clock(), []
        for request in plan(workload):
            await asyncio.wait({until}, timeout=start_s + request.arrival_s - clock())
            if until.done():
                break
            tasks.append(asyncio.create_task(measure(request, target, clock(), REQUEST_TIMEOUT_S)))
        records = await asyncio.gather(*tasks)
        return [record.ttft_s for record in records if record.ttft_s is not None]

    async def _send(self, target: GrpcTarget, rate: float, seconds: float) -> list[RequestRecord]:
        """Every configuration gets the same requests at the same rate."""
        seed = round(rate * 1000)
        rows = tuple(random.Random(seed).choices(self.rows, k=int(rate * seconds * 2) + 100))
        watcher = Records()
        await run(
            Workload(Poisson(rate), trace=rows, duration_s=seconds, seed=seed), target, REQUEST_TIMEOUT_S, watcher
        )
        return watcher.all


def _percentiles(records: Sequence[RequestRecord]) -> tuple[float, float]:
    """p90 of TTFT and of TPOT, in seconds."""
    ttft = [record.ttft_s for record in records if record.ttft_s is not None]
    tpot = [record.tpot_s for record in records if record.tpot_s is not None]
    return float(np.quantile(ttft or [0.0], 0.9)), float(np.quantile(tpot or [0.0], 0.9))
