"""One target under one workload after another: warm-up, then what is measured, shown while it goes on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from rich.console import Console

from loadgen.progress import RunView, shown
from loadgen.record import Target
from loadgen.results import Results, Run, SweepRun
from loadgen.runner import clock, measure, run
from loadgen.slo import Slo, attainment
from loadgen.sweep import Search, find_highest_rate
from loadgen.workload import ClosedLoop, Poisson, Workload, plan

# A rate that is too high shows as a backlog, which must have time to outgrow the objective for the first token.
SWEEP_LENGTH, MAX_TTFT_S = 5.0, 2.0  # times the objective, of which no more than this counts
SWEEP_SEED = 1000  # far from the seeds of what was sent before: a cached prompt would be a faster one


@dataclass(frozen=True)
class Session:
    """Measures into `results`."""

    results: Results
    console: Console
    timeout_s: float  # for one request
    num_warmups: int

    async def measure(self, name: str, workload: Workload, target: Target) -> None:
        """Failed requests are part of what is measured; nothing is raised for them."""
        await self.warm_up(workload, target)
        view = RunView(f"{target.label}  {name}".rstrip(), workload.num_planned, clock)
        self.results.runs.append(Run(name, target.label, workload, view.records))
        async with shown(view, self.console):
            await run(workload, target, self.timeout_s, view)

    async def warm_up(self, workload: Workload, target: Target) -> None:
        """Requests like the measured ones, but with prompts of their own, so that they warm no prefix cache."""
        warmups = replace(
            workload,
            pacing=ClosedLoop(1),
            seed=workload.seed + 1,
            num_requests=self.num_warmups,
            duration_s=None,
        )
        for request in plan(warmups):
            await measure(request, target, clock(), self.timeout_s)

    async def sweep(self, workload: Workload, target: Target, slo: Slo, search: Search) -> None:
        """Each rate gets requests of its own, as many as the workload has, and enough to be more than a burst."""
        swept = SweepRun(target.label, slo, search.goal)
        self.results.sweeps.append(swept)

        async def attainment_at(rate: float) -> float:
            seed = workload.seed + SWEEP_SEED * (len(swept.runs) + 1)
            tried = replace(workload, pacing=Poisson(rate), seed=seed)
            if workload.num_requests is not None and workload.duration_s is None:
                tried = replace(
                    tried,
                    num_requests=max(workload.num_requests, ceil(rate * SWEEP_LENGTH * min(slo.ttft_s, MAX_TTFT_S))),
                )
            view = RunView(f"{target.label} at {rate:.2f}/s", tried.num_planned, clock)
            async with shown(view, self.console):
                await run(tried, target, self.timeout_s, view)
            swept.runs.append((rate, view.records))
            return attainment(view.records, slo)

        await self.warm_up(workload, target)
        await find_highest_rate(attainment_at, search)
        swept.is_complete = True
