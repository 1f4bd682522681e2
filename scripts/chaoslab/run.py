"""The order of things: start, learn the right answers, load and faults, let it come to rest, look at what is left."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from chaoslab.asks import Ask, cut_at_stop, make_asks, stopping
from chaoslab.client import Client
from chaoslab.faults import Injector
from chaoslab.figures import Run
from chaoslab.load import Known, Load, Sent
from chaoslab.outcome import Ending, Outcome
from chaoslab.router_log import Retries, count_retries
from chaoslab.schedule import FaultKind, FaultPlan
from chaoslab.system import Processes, Size, plan_for, run_system
from chaoslab.watch import Watch
from cluster.plan import Plan
from cluster.supervisor import MemberEvent
from common.config import ServeConfig
from loadgen.workload import LengthRange

READY_S = 120.0
REST_S = 15.0  # for everything to be given back
PROGRESS_S = 5.0
CONCURRENT_LESSONS = 4  # while the right answers are learned
ROUTER = "router"  # how the names of these members begin

Say = Callable[[str], None]


class ChaosFailed(Exception):
    """There was no system to be tested: it did not start, or did not answer before any fault."""


@dataclass(frozen=True)
class Options:
    seed: int
    duration_s: float
    rate: float
    fault_interval_s: float
    kinds: Sequence[FaultKind]
    targets: Sequence[str]  # roles, and "router"
    size: Size
    deadline_s: float  # of each request
    num_asks: int  # different requests
    output_tokens: LengthRange


async def run_chaos(config: ServeConfig, options: Options, logs: Path, say: Say) -> Run:
    """Raises: ConfigError, ChaosFailed."""
    chaos = _Chaos(options, logs, say)
    return await run_system(plan_for(options.size, config), logs, chaos.note, chaos.work)


class _Chaos:
    def __init__(self, options: Options, logs: Path, say: Say) -> None:
        self._options = options
        self._logs = logs
        self._say = say
        self._injector: Injector | None = None

    def note(self, event: MemberEvent) -> None:
        if self._injector is not None:
            self._injector.note(event)

    async def work(self, plan: Plan, processes: Processes) -> Run:
        routers = [spec.name for spec in plan.specs if spec.role is None]
        watch = Watch(dict(zip(routers, plan.control_addresses, strict=True)), plan.config.security.cluster_access())
        async with _beside(watch.run()):
            self._say(f"starting {len(plan.specs)} processes")
            if not await watch.is_whole(len(plan.worker_names), READY_S):
                raise ChaosFailed(f"the workers and their pairs were not ready within {READY_S:.0f} s")
            client = Client(plan.http_url, plan.config.model.served_name, self._options.deadline_s)
            try:
                known = await self._learn(client)
                self._injector = Injector(processes, watch, self._say)
                run = Run(time.monotonic(), frozenset(routers), unexplained=self._injector.unexplained)
                await self._storm(client, known, self._injector, plan, run)
            finally:
                await client.close()
            self._say("waiting until everything is given back")
            return replace(run, leftovers=await watch.leftovers(REST_S), retries=self._retries())

    def _retries(self) -> Retries:
        text = "".join(path.read_text(errors="replace") for path in self._logs.glob(f"{ROUTER}*.log"))
        return count_retries(text.splitlines())

    async def _learn(self, client: Client) -> list[Known]:
        """The answers before any fault. A third of the requests is asked again with a stop string in its answer."""
        options = self._options
        asks = make_asks(options.seed, options.num_asks, options.output_tokens)
        known = await self._answers(client, asks)
        random = Random(options.seed)
        for index in range(0, len(known), 3):
            ask = stopping(known[index].ask, known[index].answer, random)
            if ask is not None:
                [stopped] = await self._answers(client, [ask])
                assert ask.stop is not None
                whole = known[index].answer
                if stopped.answer.text != cut_at_stop(whole, ask.stop):
                    raise ChaosFailed(f"without any fault, stop={ask.stop!r} gave {stopped.answer} instead of {whole}")
                known[index] = stopped
        num_stops = sum(each.ask.stop is not None for each in known)
        self._say(f"learned {len(known)} answers, {num_stops} of them ended by a stop string")
        return known

    async def _answers(self, client: Client, asks: Sequence[Ask]) -> list[Known]:
        gate = asyncio.Semaphore(CONCURRENT_LESSONS)

        async def answer(number: int, ask: Ask) -> Known:
            async with gate:
                outcome = Outcome(f"lesson-{number}", time.monotonic())
                await client.send(ask, outcome)
            if outcome.answer is None:
                raise ChaosFailed(f"without any fault, {outcome.name} ended as {outcome.ending}: {outcome.failure}")
            return Known(ask, outcome.answer)

        return list(await asyncio.gather(*(answer(number, ask) for number, ask in enumerate(asks))))

    async def _storm(self, client: Client, known: Sequence[Known], injector: Injector, plan: Plan, run: Run) -> None:
        options = self._options
        faults = FaultPlan(
            options.seed,
            options.fault_interval_s,
            options.duration_s,
            options.kinds,
            [spec.name for spec in plan.specs if (spec.role or ROUTER) in options.targets],
        ).faults()
        self._say(f"{len(faults)} faults in {options.duration_s:g} s, {options.rate:g} requests/s")
        load = Load(options.seed, options.rate, options.duration_s)
        async with _beside(self._progress(run)):
            await asyncio.gather(
                load.run(client, known, run.start_s, run.sent), injector.carry_out(faults, run.start_s)
            )
        run.records.extend(injector.records)

    async def _progress(self, run: Run) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            self._say(f"{time.monotonic() - run.start_s:6.1f} s  {_standing(run.sent)}")


def _standing(sent: Sequence[Sent]) -> str:
    ended = [each for each in sent if each.outcome.end_s is not None]
    endings = Counter(each.outcome.ending for each in ended)
    told = [f"{endings[ending]} {ending}" for ending in Ending if endings[ending]]
    num_wrong = sum(each.mistake is not None for each in ended)
    return ", ".join([f"{len(sent)} sent", f"{len(sent) - len(ended)} in flight", *told, f"{num_wrong} wrong"])


@asynccontextmanager
async def _beside(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Goes on until the block ends; a failure of either ends the other and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
            yield
            for task in tasks:
                task.cancel()
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
