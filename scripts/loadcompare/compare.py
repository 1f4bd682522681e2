"""Each contestant in turn: every workload, then the running streams, then perhaps the search for its highest rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loadcompare.contestants import Arena
from loadcompare.running_streams import Scenario, measure_streams
from loadcompare.workloads import MIX
from loadgen.arguments import Contestant
from loadgen.record import RequestFailed, Target
from loadgen.session import Session
from loadgen.slo import Slo
from loadgen.sweep import Search
from loadgen.workload import Workload
from servingbench.client import BenchFailed


@dataclass(frozen=True)
class Comparison:
    session: Session
    arena: Arena
    workloads: dict[str, Workload]
    scenario: Scenario
    objectives: tuple[Slo, Search] | None  # None: no search

    async def measure_each(self, contestants: Sequence[Contestant]) -> None:
        """One after the other: nothing else of ours runs meanwhile. Raises: as Arena.host; BenchFailed."""
        for contestant in contestants:
            await self.arena.host(contestant, self._measure)

    async def _measure(self, target: Target) -> None:
        for name, workload in self.workloads.items():
            await self.session.measure(name, workload, target)
        await self._measure_streams(target)
        if self.objectives is not None:
            await self.session.sweep(self.workloads[MIX], target, *self.objectives)

    async def _measure_streams(self, target: Target) -> None:
        session = self.session
        session.console.print(f"{target.label}  running streams, alone and beside long prompts", highlight=False)
        try:
            session.results.streams.append(await measure_streams(self.scenario, target, session.timeout_s))
        except (RequestFailed, TimeoutError) as error:
            raise BenchFailed(f"{target.label}: the running streams broke: {error}") from error
