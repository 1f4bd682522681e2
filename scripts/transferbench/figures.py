"""From passes to figures: medians, each with a name that stays the same.

| metric | what it is |
|---|---|
| rate | bytes / time from the first piece to the destination's word that all are verified |
| limit | the rate of the same pieces through the raw limit that goals.py names, moments before |
| share | rate / limit, pass by pass |
| beside | the same through the library that carries the transport, with nothing of ours |
| cpu, cpu_limit | CPU seconds of both processes for each GB |
| checksum_share | time to hash the same bytes once / the transfer's time |
| pieces | into which the transfer was cut |
| exposed | P's first token at the client → D's second token there, less one decode step of the same request |
| exposed_share | that / the prefill time of the same request |
| prefill | P schedules the first chunk → the first token at the router |
| sending_cost | prefill with KV sent / prefill of a prompt whose answer is one token, which sends none, less 1 |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench_goal import Goal
from transferbench.goals import CHECKSUM_SHARE, SENDING_COST, YARDSTICKS, exposed_goal, exposed_share_goal
from transferbench.link import Sample
from transferbench.measure import Pass
from transferbench.serving import HandoffPass, Load


@dataclass(frozen=True)
class Figure:
    """value is None for what was skipped or failed; unit says why then."""

    subject: str  # "grpc", or "handoff"
    metric: str
    at: str  # "64_mb"; "512_tokens_8_in_flight"; "" where there is no such choice
    value: float | None
    unit: str
    goal: Goal | None = None

    @property
    def name(self) -> str:
        return f"{self.subject}.{self.metric}" + (f"_at_{self.at}" if self.at else "")

    @property
    def holds(self) -> bool | None:
        return None if self.goal is None or self.value is None else self.goal.holds(self.value)


def transport_figures(transport: str, passes: Mapping[int, Sequence[Pass]]) -> list[Figure]:
    return [
        Figure(transport, metric, f"{size}_mb", value, unit, goal)
        for size, each in passes.items()
        for metric, value, unit, goal in _of_one_size(transport, each)
    ]


def handoff_figures(passes: Sequence[HandoffPass]) -> list[Figure]:
    """passes: at least one."""
    figures = []
    for load in passes[0].handoffs:
        for metric, value, unit, goal in _of_one_load(load, passes):
            figures.append(Figure("handoff", metric, str(load), value, unit, goal))
    for num_tokens in passes[0].sending:
        cost = median(each.sending[num_tokens].cost for each in passes)
        figures.append(Figure("handoff", "sending_cost", f"{num_tokens}_tokens", cost, "of the prefill", SENDING_COST))
    return figures


def unmeasured(subject: str, reason: str) -> Figure:
    """reason: "skipped: ...", "failed: ..."."""
    return Figure(subject, "rate", "", None, " ".join(reason.split()))


def figures_json(figures: Iterable[Figure]) -> list[dict[str, Any]]:
    return [
        {
            "name": figure.name,
            "value": figure.value,
            "unit": figure.unit,
            "goal": None if figure.goal is None else str(figure.goal),
            "holds": figure.holds,
        }
        for figure in figures
    ]


Median = tuple[str, float, str, Goal | None]  # metric, value, unit, goal


def _of_one_size(transport: str, passes: Sequence[Pass]) -> Iterator[Median]:
    share = median(_rate(each.transfer) / _rate(each.limit) for each in passes)
    yield "rate", median(_rate(each.transfer) for each in passes), "GB/s", None
    yield "limit", median(_rate(each.limit) for each in passes), "GB/s", None
    yield "share", share, "of the limit", YARDSTICKS[transport].least_share
    beside = [each.beside for each in passes if each.beside is not None]
    if beside:
        yield "beside", median(map(_rate, beside)), "GB/s", None
    yield "cpu", median(_cpu_s_per_gb(each.transfer) for each in passes), "s/GB", None
    yield "cpu_limit", median(_cpu_s_per_gb(each.limit) for each in passes), "s/GB", None
    checksum_share = median(each.checksum_s / each.transfer.seconds for each in passes)
    yield "checksum_share", checksum_share, "of the transfer", CHECKSUM_SHARE
    yield "pieces", float(passes[0].num_pieces), "pieces", None


def _of_one_load(load: Load, passes: Sequence[HandoffPass]) -> Iterator[Median]:
    handoffs = [handoff for each in passes for handoff in each.handoffs[load]]
    share = median(handoff.exposed_s / handoff.prefill_s for handoff in handoffs)
    exposed_ms = median(handoff.exposed_s for handoff in handoffs) * 1e3
    yield "exposed", exposed_ms, "ms", exposed_goal(load.num_tokens)
    yield "exposed_share", share, "of the prefill", exposed_share_goal(load.num_tokens)
    yield "prefill", median(handoff.prefill_s for handoff in handoffs) * 1e3, "ms", None


def _rate(sample: Sample) -> float:
    """GB/s, of 10⁹ bytes."""
    return sample.num_bytes / sample.seconds / 1e9


def _cpu_s_per_gb(sample: Sample) -> float:
    return sample.cpu_s / sample.num_bytes * 1e9
