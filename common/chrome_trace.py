"""Requests as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open: a process for each member, a slice for
each stage.

The format: Google's "Trace Event Format"; complete events ("X") in microseconds, metadata events ("M") for names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.lifecycle import Stage

JsonObject = dict[str, Any]

ROUTER = "router"
OF_WHO_COMPUTES_THE_PROMPT = frozenset({Stage.PREFILL_QUEUE, Stage.PREFILL})
OF_THE_DECODE_WORKER = frozenset({Stage.RESERVE, Stage.TRANSFER, Stage.DECODE_WAIT, Stage.DECODE})


@dataclass(frozen=True)
class TracedRequest:
    name: str
    start_s: float  # by any clock, the same for all
    stages: Sequence[tuple[str, float, float]]  # name, start and end in seconds since start_s; in order
    prefill_worker: str  # empty: the decode worker computed the prompt
    decode_worker: str
    about: Mapping[str, str | int | float] = field(default_factory=dict)

    @property
    def end_s(self) -> float:
        return self.start_s + (self.stages[-1][2] if self.stages else 0.0)

    def member_of(self, stage: str) -> str:
        """On whose track a stage is; without workers, all is on the router's."""
        if stage in OF_WHO_COMPUTES_THE_PROMPT:
            return self.prefill_worker or self.decode_worker or ROUTER
        return (self.decode_worker if stage in OF_THE_DECODE_WORKER else "") or ROUTER


def chrome_trace(requests: Sequence[TracedRequest]) -> JsonObject:
    """On the router's track the whole request, and in it what it waited for there; on each worker's its stages."""
    tracks = _Tracks()
    zero_s = min((request.start_s for request in requests), default=0.0)
    for request in sorted(requests, key=lambda request: request.start_s):
        for member, slices in _by_member(request).items():
            track = tracks.place(member, slices[0].start_s, max(each.end_s for each in slices))
            for each in slices:
                tracks.events.append(track | _event(each, zero_s))
    return {"traceEvents": [*tracks.names(), *tracks.events], "displayTimeUnit": "ms"}


@dataclass(frozen=True)
class _Slice:
    name: str
    category: str
    start_s: float
    end_s: float
    about: Mapping[str, str | int | float]


def _by_member(request: TracedRequest) -> dict[str, list[_Slice]]:
    """A member's slices of one request share a track: they nest or follow each other."""
    whole = _Slice(request.name, "request", request.start_s, request.end_s, request.about)
    slices: dict[str, list[_Slice]] = {ROUTER: [whole]}
    for stage, start_s, end_s in request.stages:
        of_stage = _Slice(stage, "stage", request.start_s + start_s, request.start_s + end_s, {"request": request.name})
        slices.setdefault(request.member_of(stage), []).append(of_stage)
    return slices


def _event(each: _Slice, zero_s: float) -> JsonObject:
    return {
        "name": each.name,
        "cat": each.category,
        "ph": "X",
        "ts": round((each.start_s - zero_s) * 1e6, 3),
        "dur": round((each.end_s - each.start_s) * 1e6, 3),
        "args": dict(each.about),
    }


class _Tracks:
    """A process for each member, in it as many threads as there are requests at once."""

    def __init__(self) -> None:
        self.events: list[JsonObject] = []
        self._ends_s: dict[str, list[float]] = {ROUTER: []}  # of the last slice on each track

    def place(self, member: str, start_s: float, end_s: float) -> JsonObject:
        """The first track that is free by then."""
        ends_s = self._ends_s.setdefault(member, [])
        lane = next((lane for lane, busy_until_s in enumerate(ends_s) if busy_until_s <= start_s), len(ends_s))
        ends_s[lane : lane + 1] = [end_s]
        return {"pid": self._pid(member), "tid": lane + 1}

    def names(self) -> Iterator[JsonObject]:
        for member, ends_s in self._ends_s.items():
            pid = self._pid(member)
            yield {"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": member}}
            yield {"name": "process_sort_index", "ph": "M", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
            for lane in range(len(ends_s)):
                yield {"name": "thread_name", "ph": "M", "pid": pid, "tid": lane + 1, "args": {"name": "requests"}}

    def _pid(self, member: str) -> int:
        return list(self._ends_s).index(member) + 1
