"""A worker's status as Prometheus metrics: the same numbers as its GetStatus, by the names of docs/architecture.md."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common.pb import serving_pb2 as pb

# Counters that can fall, which Prometheus calls gauges.
NOT_MONOTONIC = frozenset({"quarantined_blocks"})

_SERIES = re.compile(r'(\w+?)(_total)?(?:\{(\w+)="([^"]*)"\})?')


def exposition(status: pb.WorkerStatus) -> bytes:
    """In Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_StatusCollector(status))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


def role_name(role: int) -> str:
    """As serve.yaml has it, such as "prefill"."""
    return pb.Role.Name(role).removeprefix("ROLE_").lower()


class _StatusCollector(Collector):
    def __init__(self, status: pb.WorkerStatus) -> None:
        self._status = status

    def collect(self) -> Iterable[Metric]:
        yield _info(self._status.hello)
        yield _gauge("uptime_seconds", "Since this process serves", self._status.uptime_s)
        yield from _load_metrics(self._status.load)
        yield from _link_metrics(self._status.links)
        yield from _counters(self._status.counters.items())


def _info(hello: pb.WorkerHello) -> Metric:
    info = GaugeMetricFamily("worker_info", "Always 1; who this is", labels=["worker", "role", "model"])
    info.add_metric([hello.worker_id, role_name(hello.role), hello.model], 1)
    return info


def _load_metrics(load: pb.WorkerLoad) -> Iterator[Metric]:
    yield _gauge("waiting_sequences", "Sequences that are not yet scheduled", load.num_waiting)
    yield _gauge("running_sequences", "Sequences that are being computed", load.num_running)
    yield _gauge("reserved_sequences", "Sequences that wait for their KV", load.num_reserved)
    yield _gauge("uncached_tokens", "Prompt tokens that are still to compute", load.uncached_tokens)
    yield _gauge("kv_blocks", "Blocks of the KV cache", load.total_blocks)
    yield _gauge("kv_blocks_used", "Those of them that sequences hold", load.total_blocks - load.free_blocks)
    yield _gauge("prefill_seconds_per_token", "Of prompts alone, as measured; 0: not yet", load.prefill_s_per_token)
    yield _gauge("decode_step_seconds", "At the sequences that decode now, as measured; 0: not yet", load.decode_step_s)
    yield _gauge("draining", "1: takes no new work", load.is_draining)


def _link_metrics(links: Iterable[pb.LinkStatus]) -> Iterator[Metric]:
    """Of the links that live. The router's /metrics has them by the workers' names."""
    labels = ["peer", "transport"]
    carried = CounterMetricFamily("link_bytes", "Bytes of KV that a link has carried", labels=labels)
    speed = GaugeMetricFamily("link_bytes_per_second", "The best that the source has measured", labels=labels)
    round_trip = GaugeMetricFamily("link_round_trip_seconds", "The best that the source has measured", labels=labels)
    for link in links:
        values = [link.peer_incarnation, link.transport]
        carried.add_metric(values, link.num_bytes)
        if link.bytes_per_s:
            speed.add_metric(values, link.bytes_per_s)
            round_trip.add_metric(values, link.round_trip_s)
    yield from (carried, speed, round_trip)


def _counters(counters: Iterable[tuple[str, int]]) -> Iterator[Metric]:
    """What GetStatus counts; a name without `_total` gets it, as Prometheus wants counters to be called."""
    families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
    for series, value in sorted(counters):
        matched = _SERIES.fullmatch(series)
        assert matched is not None, series
        name, label, label_value = matched.group(1, 3, 4)
        if name not in families:
            kind = GaugeMetricFamily if name in NOT_MONOTONIC else CounterMetricFamily
            families[name] = kind(name, "See docs/architecture.md", labels=[label] if label else [])
        families[name].add_metric([label_value] if label else [], value)
    yield from families.values()


def _gauge(name: str, documentation: str, value: float) -> Metric:
    return GaugeMetricFamily(name, documentation, value=value)
