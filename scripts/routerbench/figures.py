"""From samples to figures, each with a name that stays the same. Percentiles are over all answers of all passes.

A direct call is what the router itself would make: of a colocated worker one Generate; of a pair a Generate, and a Run
once the reservation is there.

| metric | what it is |
|---|---|
| ttft | request sent → first token at the client |
| itl | the gap between two tokens at the client, from the second gap on |
| delay | a worker sends a token → it is at the client |
| added_ttft, added_itl, added_delay | that, less the same percentile of direct calls |
| stream_events | pieces of answers a second, as fast as one core of the router goes |
| stream_tokens | tokens in them: more where one piece carries several |
| paced_events | pieces a second where the workers offer 5,000, each token by itself |
| paced_cpu | CPU time of the router for each token then; a request's own cost included |
| requests | answers of 4 tokens a second, 32 clients |
| request_cpu | CPU time of the router for each of them |
| open_stream | resident memory for each stream that waits for its next token |
| resident | resident memory after so many requests |
| growth | resident memory at the last such count / at the first, less 1 |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from bench_goal import Goal
from routerbench.load import LatencySample, RateSample
from routerbench.measure import APIS, DIRECT, MemorySample, PoolSamples, Samples

PERCENTILES = (50, 99)
LATENCIES: Mapping[str, Callable[[LatencySample], list[float]]] = {
    "ttft": lambda sample: sample.ttft_s,
    "itl": lambda sample: sample.itl_s,
    "delay": lambda sample: sample.delay_s,
}


GOALS = {
    "added_ttft_p50": Goal("<=", 2.0),  # ms
    "added_itl_p50": Goal("<=", 0.3),  # ms
    "stream_events": Goal(">=", 5000.0),
    "growth": Goal("<=", 0.05),  # what an allocator wanders
}


@dataclass(frozen=True)
class Figure:
    subject: str  # "colocated.http", "pair.direct", "memory"
    metric: str
    value: float
    unit: str
    goal: Goal | None = None

    @property
    def name(self) -> str:
        return f"{self.subject}.{self.metric}"

    @property
    def holds(self) -> bool | None:
        return None if self.goal is None else self.goal.holds(self.value)


def figures_of(samples: Samples) -> list[Figure]:
    figures = []
    for pool, of_pool in samples.pools.items():
        figures += [*_latencies(pool, of_pool), *_rates(pool, of_pool)]
    if samples.memory is not None:
        figures += _memory(samples.memory)
    return figures


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


def _latencies(pool: str, samples: PoolSamples) -> Iterator[Figure]:
    by_way = {way: _percentiles_ms(passes) for way, passes in samples.latency.items()}
    for way, percentiles in by_way.items():
        for metric, value in percentiles.items():
            yield Figure(f"{pool}.{way}", metric, value, "ms")
    for way in APIS:
        for metric, value in by_way[way].items():
            added = f"added_{metric}"
            yield Figure(f"{pool}.{way}", added, value - by_way[DIRECT][metric], "ms", GOALS.get(added))


def _percentiles_ms(passes: Sequence[LatencySample]) -> dict[str, float]:
    found = {}
    for metric, seconds_of in LATENCIES.items():
        seconds = [second for each in passes for second in seconds_of(each)]
        for percent in PERCENTILES:
            found[f"{metric}_p{percent}"] = float(np.percentile(seconds, percent)) * 1e3
    return found


def _rates(pool: str, samples: PoolSamples) -> Iterator[Figure]:
    for way in APIS:
        subject = f"{pool}.{way}"
        streams, paced, requests = samples.streams[way], samples.paced[way], samples.requests[way]
        events = median(sample.steady_events_per_s for sample in streams)
        yield Figure(subject, "stream_events", events, "events/s", GOALS["stream_events"])
        yield Figure(subject, "stream_tokens", median(sample.tokens_per_s for sample in streams), "tokens/s")
        yield Figure(subject, "paced_events", median(each.steady_events_per_s for each in paced), "events/s")
        yield Figure(subject, "paced_cpu", median(each.cpu_s / each.num_tokens for each in paced) * 1e6, "us/token")
        yield Figure(subject, "requests", median(each.num_requests / each.seconds for each in requests), "requests/s")
        yield Figure(subject, "request_cpu", _cpu_ms_per_request(requests), "ms")


def _cpu_ms_per_request(samples: Sequence[RateSample]) -> float:
    return median(sample.cpu_s / sample.num_requests for sample in samples) * 1e3


def _memory(memory: MemorySample) -> Iterator[Figure]:
    yield Figure("memory", "open_stream", memory.per_stream_bytes / 2**10, "KiB")
    for num_requests, num_bytes in memory.by_requests.items():
        yield Figure("memory", f"resident_at_{num_requests}_requests", num_bytes / 2**20, "MiB")
    first, *_, last = memory.by_requests.values()
    yield Figure("memory", "growth", last / first - 1, "of the first", GOALS["growth"])
