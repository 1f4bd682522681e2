"""Everything that one call of load_test.py measured. Filled while it runs, so that an interrupt loses nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from loadgen.fields import statistics_of
from loadgen.metrics import Distribution, Judgement, Summary, summarize
from loadgen.record import RequestRecord
from loadgen.slo import Slo, attainment
from loadgen.sweep import RatePoint, Sweep, concluded
from loadgen.workload import Workload


@dataclass(frozen=True)
class Run:
    """One workload on one target."""

    workload_name: str
    target: str
    workload: Workload
    records: list[RequestRecord]  # in the order in which they ended

    def summary(self, judgement: Judgement) -> Summary:
        return summarize(self.records, judgement)


@dataclass(frozen=True)
class Gap:
    """Between two token events of one running stream."""

    end_s: float  # after the start of its phase
    seconds: float


@dataclass(frozen=True)
class StreamsRun:
    """Streams that went on alone, and then while long prompts arrived beside them, on one target."""

    target: str
    num_streams: int
    idle: list[Gap]
    loaded: list[Gap]
    prompts: list[RequestRecord]
    prompt_arrivals_s: list[float]  # after the start of the loaded phase

    def idle_ms(self, judgement: Judgement) -> dict[str, float]:
        """The gaps' mean and percentiles, by name."""
        return _gaps_ms(self.idle, judgement)

    def loaded_ms(self, judgement: Judgement) -> dict[str, float]:
        return _gaps_ms(self.loaded, judgement)


@dataclass
class SweepRun:
    """The runs of one target's search for its highest rate, so far."""

    target: str
    slo: Slo
    goal: float
    runs: list[tuple[float, list[RequestRecord]]] = field(default_factory=list)  # by rate, in the order tried
    is_complete: bool = False  # else it ended before the answer

    @property
    def sweep(self) -> Sweep:
        points = [RatePoint(rate, attainment(records, self.slo)) for rate, records in self.runs if records]
        return concluded(points, self.goal)


@dataclass
class Results:
    judgement: Judgement
    runs: list[Run] = field(default_factory=list)
    streams: list[StreamsRun] = field(default_factory=list)
    sweeps: list[SweepRun] = field(default_factory=list)
    is_complete: bool = False  # else this is what was measured before an interrupt or a failure

    @property
    def by_workload(self) -> dict[str, list[Run]]:
        grouped: dict[str, list[Run]] = {}
        for run in self.runs:
            grouped.setdefault(run.workload_name, []).append(run)
        return grouped

    @property
    def is_empty(self) -> bool:
        return not (self.runs or self.streams or self.sweeps)

    @property
    def is_clean(self) -> bool:
        """Every request was answered. Those of a sweep do not count: it goes on until they are not."""
        records = [record for run in self.runs for record in run.records]
        records += [record for streams in self.streams for record in streams.prompts]
        return all(record.is_completed for record in records)


def _gaps_ms(gaps: list[Gap], judgement: Judgement) -> dict[str, float]:
    return statistics_of(Distribution.of_seconds([gap.seconds for gap in gaps], judgement.percentiles))
