"""Carries out the schedule: signals to processes, and for each fault when its target served again."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from signal import SIGCONT, SIGKILL, SIGSTOP, SIGTERM, Signals

from chaoslab.schedule import Fault, FaultKind
from chaoslab.system import Death, Processes
from chaoslab.watch import Watch
from cluster.supervisor import MemberDied, MemberEvent

SLOW_PERIOD_S = 0.2
SLOW_SHARE = 0.25  # of the period in which it runs
# The supervisor's longest pause, a start with its model, and the checks of its pairs.
RETURN_S = 60.0


@dataclass
class FaultRecord:
    """One fault as it happened; times are of time.monotonic()."""

    fault: Fault
    began_s: float
    hit: bool = True  # False: no process ran under this name
    ended_s: float | None = None  # the target is left alone
    served_again_s: float | None = None

    @property
    def has_ended_well(self) -> bool:
        return not self.hit or self.served_again_s is not None

    def covers(self, start_s: float, end_s: float) -> bool:
        """Whether its effects could be felt at some time from `start_s` to `end_s`."""
        return self.hit and self.began_s <= end_s and (self.served_again_s is None or start_s <= self.served_again_s)


@dataclass
class Injector:
    processes: Processes
    watch: Watch
    say: Callable[[str], None]
    records: list[FaultRecord] = field(default_factory=list)
    unexplained: list[Death] = field(default_factory=list)
    _expected: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))  # member → how it may end

    def note(self, event: MemberEvent) -> None:
        """What the supervisor sees: a death is ours, or a bug."""
        if not isinstance(event, MemberDied):
            return
        name, reason = event.spec.name, event.ending.reason
        if reason in self._expected[name]:
            self._expected[name].clear()
            return
        self.unexplained.append(Death(name, event.ending))
        self.say(f"unexpected: {name} died: {reason} {event.ending.last_words}")

    async def carry_out(self, faults: Sequence[Fault], start_s: float) -> None:
        """Returns when every target serves again, or has had RETURN_S for it."""
        async with asyncio.TaskGroup() as group:
            for fault in faults:
                await asyncio.sleep(start_s + fault.at_s - time.monotonic())
                group.create_task(self._one(fault, start_s))

    async def _one(self, fault: Fault, start_s: float) -> None:
        record = FaultRecord(fault, time.monotonic())
        self.records.append(record)
        life = self.watch.life(fault.target)
        record.hit = await self._inflict(fault)
        record.ended_s = time.monotonic()
        lasts = f" for {fault.lasts_s:.1f} s" if fault.lasts_s else ""
        at = f"{record.began_s - start_s:6.1f} s  {fault.kind} {fault.target}{lasts}"
        if not record.hit:
            self.say(f"{at}: it was not running")
            return
        has_died = fault.kind in (FaultKind.KILL, FaultKind.RESTART)
        record.served_again_s = await self.watch.served(
            fault.target, life if has_died else None, record.ended_s, RETURN_S
        )
        if record.served_again_s is None:
            self.say(f"{at}: it did not serve again within {RETURN_S:.0f} s")
        else:
            self.say(f"{at}: served again after {record.served_again_s - record.began_s:.1f} s")

    async def _inflict(self, fault: Fault) -> bool:
        name = fault.target
        match fault.kind:
            case FaultKind.KILL:
                return self._end(name, SIGKILL, ["killed by SIGKILL"])
            case FaultKind.RESTART:
                return self._end(name, SIGTERM, ["exit code 0", "killed by SIGTERM"])  # the latter: while it starts
            case FaultKind.FREEZE:
                with self._going_on_after(name):
                    hit = self.processes.signal(name, SIGSTOP)
                    await asyncio.sleep(fault.lasts_s)
                return hit
            case FaultKind.SLOW:
                return await self._slow(name, fault.lasts_s)

    def _end(self, name: str, number: Signals, endings: list[str]) -> bool:
        hit = self.processes.signal(name, number)
        if hit:
            self._expected[name] += endings
        return hit

    async def _slow(self, name: str, lasts_s: float) -> bool:
        end_s = time.monotonic() + lasts_s
        hit = True
        while hit and time.monotonic() < end_s:
            with self._going_on_after(name):
                hit = self.processes.signal(name, SIGSTOP)
                await asyncio.sleep(SLOW_PERIOD_S * (1 - SLOW_SHARE))
            await asyncio.sleep(SLOW_PERIOD_S * SLOW_SHARE)
        return hit

    @contextmanager
    def _going_on_after(self, name: str) -> Iterator[None]:
        """However the block ends: a process that stands still cannot be asked to stop."""
        try:
            yield
        finally:
            self.processes.signal(name, SIGCONT)
