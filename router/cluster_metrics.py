"""What the router knows of its workers, pairs and queue, as Prometheus gauges: the numbers of `pdserve status`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common.pb import serving_pb2 as pb
from router.worker import ROLES


class ClusterCollector(Collector):
    """Reads the status when it is scraped, so that nothing is kept up to date between two scrapes."""

    def __init__(self, status: Callable[[], pb.ClusterStatus]) -> None:
        self._status = status

    def collect(self) -> Iterable[Metric]:
        status = self._status()
        yield GaugeMetricFamily("ready", "1: a request that is sent now can be served", value=status.is_ready)
        yield GaugeMetricFamily("queued_requests", "Requests that wait for workers with room", value=status.num_queued)
        yield GaugeMetricFamily(
            "active_requests", "Requests that workers have been chosen for", value=status.num_active
        )
        yield from _worker_metrics(status.workers)
        yield from _pair_metrics(status.pairs)


def _worker_metrics(workers: Iterable[pb.WorkerSummary]) -> Iterator[Metric]:
    labels = ["worker", "role"]
    families = [
        (GaugeMetricFamily(f"worker_{name}", documentation, labels=labels), value)
        for name, documentation, value in _OF_A_WORKER
    ]
    for worker in workers:
        for family, value in families:
            family.add_metric([worker.hello.worker_id, ROLES[worker.hello.role]], value(worker))
    for family, _ in families:
        yield family


_OF_A_WORKER: tuple[tuple[str, str, Callable[[pb.WorkerSummary], float]], ...] = (
    ("fit", "1: it may be given work; one that is gone has no series", lambda it: not it.unfit_reason),
    ("assigned_requests", "Requests that this router has given it", lambda it: it.num_assigned),
    ("waiting_sequences", "Not yet scheduled", lambda it: it.load.num_waiting),
    ("running_sequences", "Being computed", lambda it: it.load.num_running),
    ("reserved_sequences", "Waiting for their KV", lambda it: it.load.num_reserved),
    ("uncached_tokens", "Prompt tokens that are still to compute", lambda it: it.load.uncached_tokens),
    ("kv_blocks", "Blocks of its KV cache", lambda it: it.load.total_blocks),
    ("kv_blocks_used", "Those that sequences hold", lambda it: it.load.total_blocks - it.load.free_blocks),
    ("cached_blocks", "In its prefix cache, as this router has heard", lambda it: it.num_cached_blocks),
    ("heartbeat_age_seconds", "Since it was last heard of", lambda it: it.heartbeat_age_s),
)


def _pair_metrics(pairs: Iterable[pb.PairSummary]) -> Iterator[Metric]:
    """A link has series from its first contact on."""
    labels, link_labels = ["prefill", "decode"], ["prefill", "decode", "transport"]
    good = GaugeMetricFamily("pair_good", "1: its KV is right, and it may be chosen", labels=labels)
    carried = CounterMetricFamily("link_bytes", "Bytes of KV that a link has carried", labels=link_labels)
    speed = GaugeMetricFamily("link_bytes_per_second", "Measured when the link was made", labels=link_labels)
    round_trip = GaugeMetricFamily("link_round_trip_seconds", "Measured when the link was made", labels=link_labels)
    for pair in pairs:
        ends = [pair.prefill_worker, pair.decode_worker]
        good.add_metric(ends, pair.standing == pb.PAIR_GOOD)
        if pair.HasField("link"):
            values = [*ends, pair.link.transport]
            carried.add_metric(values, pair.link.num_bytes)
            speed.add_metric(values, pair.link.bytes_per_s)
            round_trip.add_metric(values, pair.link.round_trip_s)
    yield from (good, carried, speed, round_trip)
