"""From what happened to the numbers of the report, each with its goal where it has one.

| figure | what it counts |
|---|---|
| requests | sent by clients; one that is sent again because its router went away is still one |
| left | the client went in the middle of its answer, as it was meant to |
| refused | turned away at once with a typed error: overloaded, or nobody there who could serve |
| admitted | requests less those refused and those that left |
| completed | a whole answer with [DONE], finish reason and usage |
| failed | admitted, and ended by a typed error |
| untyped | ended by anything else: a broken connection although no router was down, an error without a code |
| wrong | text, finish reason or usage differ from the fault-free answer; of answers that broke off, the text so far |
| hung | no end by its deadline and a margin |
| resent | by the client, because a router was killed or stopped with its answer |
| retried, migrated | attempts that routers began again, and those among them that went on in the middle of an answer |
| leaked | KV blocks that are neither free nor cached, and requests still counted, when nothing runs any more |
| not_back | faults whose target did not serve again |
| crashes | deaths of processes that no fault explains |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from chaoslab.faults import FaultRecord
from chaoslab.load import Sent
from chaoslab.outcome import Break, Ending, Outcome
from chaoslab.router_log import Retries
from chaoslab.schedule import FaultKind
from chaoslab.system import Death
from chaoslab.watch import Leftover

MIN_COMPLETED = 0.99  # of the admitted requests
MAY_BREAK = (FaultKind.KILL, FaultKind.RESTART)  # the connections of a router


@dataclass(frozen=True)
class Figure:
    name: str
    value: float
    unit: str
    at_most: float | None = None
    at_least: float | None = None

    @property
    def goal(self) -> str | None:
        if self.at_most is not None:
            return f"<= {self.at_most:g}"
        return None if self.at_least is None else f">= {self.at_least:g}"

    @property
    def holds(self) -> bool | None:
        if self.at_most is not None:
            return self.value <= self.at_most
        return None if self.at_least is None else self.value >= self.at_least

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "goal": self.goal,
            "holds": self.holds,
        }


@dataclass(frozen=True)
class Run:
    """Everything that was seen."""

    start_s: float
    routers: frozenset[str]  # member names
    sent: list[Sent] = field(default_factory=list)
    records: list[FaultRecord] = field(default_factory=list)
    leftovers: list[Leftover] = field(default_factory=list)
    unexplained: list[Death] = field(default_factory=list)
    retries: Retries = field(default_factory=Retries)

    def ending(self, outcome: Outcome) -> Ending:
        """A stream may break with its router, and then the client's second try counts; never otherwise."""
        for each in outcome.breaks:
            if not self._is_excused(each):
                return Ending.FAILED if each.is_typed else Ending.UNTYPED
        return outcome.ending

    def of(self, ending: Ending) -> list[Outcome]:
        return [each.outcome for each in self.sent if self.ending(each.outcome) is ending]

    def ttft_s(self, *, in_fault: bool) -> list[float]:
        """Of requests whose first token came while no fault could be felt since they were sent, or of the others."""
        return [
            each.outcome.ttft_s
            for each in self.sent
            if each.outcome.ttft_s is not None and self._is_in_fault(each.outcome) is in_fault
        ]

    def _is_in_fault(self, outcome: Outcome) -> bool:
        assert outcome.first_text_s is not None
        return any(record.covers(outcome.sent_s, outcome.first_text_s) for record in self.records)

    def _is_excused(self, each: Break) -> bool:
        return any(
            record.fault.target in self.routers
            and record.fault.kind in MAY_BREAK
            and record.covers(each.at_s, each.at_s)
            for record in self.records
        )


def figures_of(run: Run) -> list[Figure]:
    return [*_requests(run), *_goals(run), *_times(run)]


def _requests(run: Run) -> Iterator[Figure]:
    num_admitted = _num_admitted(run)
    refused, failed = run.of(Ending.REFUSED), run.of(Ending.FAILED)
    yield Figure("requests", len(run.sent), "")
    yield Figure("left", len(run.of(Ending.LEFT)), "")
    yield Figure("refused", len(refused), "")
    yield from _by_code("refused", refused)
    yield Figure("admitted", num_admitted, "")
    yield Figure("completed", len(run.of(Ending.COMPLETED)), "")
    yield Figure("failed", len(failed), "")
    yield from _by_code("failed", failed)
    yield Figure("resent", sum(bool(each.outcome.breaks) for each in run.sent), "")
    yield Figure("retried", run.retries.num_retried, "")
    yield Figure("migrated", run.retries.num_migrated, "")
    yield Figure("faults", sum(record.hit for record in run.records), "")


def _goals(run: Run) -> Iterator[Figure]:
    num_admitted = _num_admitted(run)
    completed = len(run.of(Ending.COMPLETED)) / num_admitted if num_admitted else 0.0
    yield Figure("completed_of_admitted", completed, "", at_least=MIN_COMPLETED)
    yield Figure("wrong", sum(each.mistake is not None for each in run.sent), "", at_most=0)
    yield Figure("hung", len(run.of(Ending.HUNG)), "", at_most=0)
    yield Figure("untyped", len(run.of(Ending.UNTYPED)), "", at_most=0)
    yield Figure("leaked_blocks", sum(leftover.blocks for leftover in run.leftovers), "blocks", at_most=0)
    yield Figure("leaked_requests", sum(leftover.requests for leftover in run.leftovers), "", at_most=0)
    yield Figure("not_back", sum(not record.has_ended_well for record in run.records), "", at_most=0)
    yield Figure("crashes", len(run.unexplained), "", at_most=0)


def _times(run: Run) -> Iterator[Figure]:
    for name, in_fault in (("outside_faults", False), ("in_faults", True)):
        times_s = run.ttft_s(in_fault=in_fault)
        for percent in (50, 99) if times_s else ():
            yield Figure(f"ttft_p{percent}_{name}", float(np.percentile(times_s, percent)), "s")
    back_s = [record.served_again_s - record.began_s for record in run.records if record.served_again_s is not None]
    for percent in (50, 100) if back_s else ():
        yield Figure(f"served_again_p{percent}", float(np.percentile(back_s, percent)), "s")


def _num_admitted(run: Run) -> int:
    return len(run.sent) - len(run.of(Ending.REFUSED)) - len(run.of(Ending.LEFT))


def _by_code(name: str, outcomes: Sequence[Outcome]) -> Iterator[Figure]:
    codes = Counter("router_gone" if each.failure is None else each.failure.code for each in outcomes)
    for code, number in sorted(codes.items()):
        yield Figure(f"{name}.{code}", number, "")
