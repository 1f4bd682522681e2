"""Which fault hits whom and when: all of it follows from the seed. No processes, no clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import TypeVar

T = TypeVar("T")


class FaultKind(StrEnum):
    KILL = "kill"  # SIGKILL; the supervisor starts it again
    FREEZE = "freeze"  # SIGSTOP, later SIGCONT: it keeps its connections and says nothing
    SLOW = "slow"  # stopped for most of the time, again and again
    RESTART = "restart"  # SIGTERM; the supervisor starts it again


# Shortest and longest. Some freezes end before anybody has noticed, which takes about two seconds, and some after.
LASTS_S = {FaultKind.FREEZE: (0.5, 5.0), FaultKind.SLOW: (2.0, 6.0)}
JITTER = 0.2  # of the interval, to either side


@dataclass(frozen=True)
class Fault:
    at_s: float  # from the start of the load
    kind: FaultKind
    target: str  # a member's name
    lasts_s: float = 0.0  # kill and restart: over at once, what follows is the system's affair


@dataclass(frozen=True)
class FaultPlan:
    seed: int
    interval_s: float
    duration_s: float  # of the load
    kinds: Sequence[FaultKind]
    targets: Sequence[str]

    def faults(self) -> list[Fault]:
        """In order of time. Kinds and targets come in rounds, so that even a few faults are of every kind."""
        random = Random(self.seed)
        kinds, targets = _rounds(random, self.kinds), _rounds(random, self.targets)
        faults: list[Fault] = []
        for number in range(1, int(self.duration_s / self.interval_s) + 1):
            at_s = self.interval_s * (number + random.uniform(-JITTER, JITTER))
            kind, target = next(kinds), next(targets)
            lasts_s = random.uniform(*LASTS_S[kind]) if kind in LASTS_S else 0.0
            if at_s < self.duration_s:
                faults.append(Fault(at_s, kind, target, min(lasts_s, self.duration_s - at_s)))
        return faults


def _rounds(random: Random, items: Sequence[T]) -> Iterator[T]:
    """For ever: each item once, in random order, before any comes again; never the same one twice in a row."""
    last: list[T] = []
    while True:
        order = random.sample(items, len(items))
        if order[:1] == last:
            order.append(order.pop(0))
        yield from order
        last = order[-1:]
