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


def worker_values(worker: pb.WorkerSummary) -> dict[str, float]:
    """By metric."""
    return {name: value(worker) for name, (_, value) in _OF_A_WORKER.items()}


def link_values(pair: pb.PairSummary) -> dict[str, float]:
    """By metric; none before the first contact."""
    return {name: value(pair.link) for name, (_, value) in _OF_A_LINK.items()} if pair.HasField("link") else {}


def _worker_metrics(workers: Iterable[pb.WorkerSummary]) -> Iterator[Metric]:
    for name, (documentation, value) in _OF_A_WORKER.items():
        family = GaugeMetricFamily(name, documentation, labels=["worker", "role"])
        for worker in workers:
            family.add_metric([worker.hello.worker_id, ROLES[worker.hello.role]], value(worker))
        yield family


def _pair_metrics(pairs: Iterable[pb.PairSummary]) -> Iterator[Metric]:
    good = GaugeMetricFamily("pair_good", "1: its KV is right, and it may be chosen", labels=["prefill", "decode"])
    for pair in pairs:
        good.add_metric([pair.prefill_worker, pair.decode_worker], pair.standing == pb.PAIR_GOOD)
    yield good
    for name, (documentation, value) in _OF_A_LINK.items():
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        family = kind(name, documentation, labels=["prefill", "decode", "transport"])
        for pair in pairs:
            if pair.HasField("link"):
                family.add_metric([pair.prefill_worker, pair.decode_worker, pair.link.transport], value(pair.link))
        yield family


_OF_A_WORKER: dict[str, tuple[str, Callable[[pb.WorkerSummary], float]]] = {
    "worker_fit": ("1: it may be given work; one that is gone has no series", lambda it: not it.unfit_reason),
    "worker_assigned_requests": ("Requests that this router has given it", lambda it: it.num_assigned),
    "worker_waiting_sequences": ("Not yet scheduled", lambda it: it.load.num_waiting),
    "worker_running_sequences": ("Being computed", lambda it: it.load.num_running),
    "worker_reserved_sequences": ("Waiting for their KV", lambda it: it.load.num_reserved),
    "worker_uncached_tokens": ("Prompt tokens that are still to compute", lambda it: it.load.uncached_tokens),
    "worker_kv_blocks": ("Blocks of its KV cache", lambda it: it.load.total_blocks),
    "worker_kv_blocks_used": ("Those that sequences hold", lambda it: it.load.total_blocks - it.load.free_blocks),
    "worker_cached_blocks": ("In its prefix cache, as this router has heard", lambda it: it.num_cached_blocks),
    "worker_heartbeat_age_seconds": ("Since it was last heard of", lambda it: it.heartbeat_age_s),
}
_OF_A_LINK: dict[str, tuple[str, Callable[[pb.LinkStatus], float]]] = {
    "link_bytes_total": ("Bytes of KV that a link has carried", lambda link: link.num_bytes),
    "link_bytes_per_second": ("The best that its source has measured", lambda link: link.bytes_per_s),
    "link_round_trip_seconds": ("The best that its source has measured", lambda link: link.round_trip_s),
}
