"""What the page is told twice a second. Every number comes from one reading of /metrics, by the same name."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Any

from prometheus_client import CollectorRegistry

from common.chrome_trace import TracedRequest, chrome_trace
from common.errors import ServingError
from common.identity import new_incarnation
from common.pb import serving_pb2 as pb
from router.dashboard.history import LATENCIES, QUANTILES, TICK_S, History, Point
from router.dashboard.reading import Reading
from router.dashboard.requests import RecentRequests, RequestView
from router.dashboard.roster import Gone, Roster
from router.request import Request
from router.worker import ROLES

JsonObject = dict[str, Any]

TOTALS = (
    *("queued_requests", "active_requests", "request_migrations_total", "prompt_tokens_total", "output_tokens_total"),
    *("requests_total", "request_retries_total", "refusals_total"),
)
TABLES = ("requests_total", "placements_total", "request_retries_total", "refusals_total", "pair_checks_total")
WORKER_METRICS = (
    *("worker_fit", "worker_assigned_requests", "worker_waiting_sequences", "worker_running_sequences"),
    *("worker_reserved_sequences", "worker_uncached_tokens", "worker_kv_blocks", "worker_kv_blocks_used"),
    *("worker_cached_blocks", "worker_heartbeat_age_seconds"),
)
LINK_METRICS = ("link_bytes_total", "link_bytes_per_second", "link_round_trip_seconds")
STANDINGS = {pb.PAIR_UNCHECKED: "unchecked", pb.PAIR_GOOD: "good", pb.PAIR_REFUSED: "refused"}


class Dashboard:
    """Call `run` as a task for as long as the router serves."""

    def __init__(
        self,
        status: Callable[[], pb.ClusterStatus],
        registry: CollectorRegistry,
        running: Callable[[], Iterable[Request]],
    ) -> None:
        self._status = status
        self._registry = registry
        self._running = running
        self._router = new_incarnation()
        self._roster = Roster()
        self._history = History()
        self._recent = RecentRequests()

    async def run(self) -> None:
        while True:
            self.tick()
            await asyncio.sleep(TICK_S)

    def tick(self) -> None:
        self._roster.note(self._status().workers)
        self._history.note(Reading(self._registry), time.time())

    def request_ended(self, request: Request, error: ServingError | None) -> None:
        self._recent.add(request, error)

    def state(self, after: int = 0) -> JsonObject:
        """after: the number of the last point of the history that the page has; 0: it has none."""
        status, reading = self._status(), Reading(self._registry)
        self._roster.note(status.workers)
        return {
            "router": self._router,  # another one: what the page remembers is of another process
            "time_s": time.time(),
            "model": status.model,
            "is_ready": status.is_ready,
            "reason": status.reason,
            "uptime_s": status.uptime_s,
            "totals": {name: reading.total(name) for name in TOTALS},
            "tables": {
                name: [{"labels": labels, "value": value} for labels, value in reading.rows(name)] for name in TABLES
            },
            "latencies": {name: _latency(reading, name, self._history.last) for name in LATENCIES},
            "workers": [*_members(status.workers, reading), *map(_gone, self._roster.gone())],
            "pairs": [*_pairs(status.pairs, reading, self._history.last)],
            "requests": [asdict(view) for view in self._recent.views(self._running())],
            "points": [_point(point) for point in self._history.since(after)],
        }

    def trace(self) -> JsonObject:
        """What runs and what ended last, for Perfetto and chrome://tracing."""
        return chrome_trace([_traced(view) for view in self._recent.views(self._running())])


def _latency(reading: Reading, name: str, last: Point | None) -> JsonObject:
    """Seconds, as all other times here."""
    every = reading.distribution(name)
    return {
        "count": every.count,
        "sum": every.sum,
        "all": [every.quantile(share) for share in QUANTILES],
        "recent": list(last.quantiles[name]) if last else [None for _ in QUANTILES],
    }


def _members(workers: Iterable[pb.WorkerSummary], reading: Reading) -> Iterator[JsonObject]:
    metrics = reading.indexed(WORKER_METRICS, "worker")
    for worker in workers:
        yield _identity(worker.hello) | {
            "state": "unfit" if worker.unfit_reason else "fit",
            "reason": worker.unfit_reason,
            "metrics": metrics[worker.hello.worker_id,],
        }


def _gone(gone_for: tuple[Gone, float]) -> JsonObject:
    gone, seconds = gone_for
    how = "left after it had drained" if gone.has_left else "lost: its connection broke"
    return _identity(gone.hello) | {"state": "gone", "reason": how, "gone_s": seconds, "metrics": {}}


def _identity(hello: pb.WorkerHello) -> JsonObject:
    return {
        "worker": hello.worker_id,
        "role": ROLES[hello.role],
        "address": hello.address,
        "metrics_address": hello.metrics_address,
        "incarnation": hello.incarnation,
    }


def _pairs(pairs: Iterable[pb.PairSummary], reading: Reading, last: Point | None) -> Iterator[JsonObject]:
    metrics = reading.indexed(LINK_METRICS, "prefill", "decode")
    for pair in pairs:
        ends = (pair.prefill_worker, pair.decode_worker)
        yield {
            "prefill": pair.prefill_worker,
            "decode": pair.decode_worker,
            "standing": STANDINGS.get(pair.standing, "unknown"),
            "reason": pair.reason,
            "transport": pair.link.transport,
            "metrics": metrics.get(ends, {}),  # none before the first contact
            "now_bytes_per_second": 0.0 if last is None else last.link_bytes_per_s.get(ends, 0.0),
        }


def _point(point: Point) -> JsonObject:
    """Links are in the table of pairs only."""
    return {
        "number": point.number,
        "time_s": point.time_s,
        "queued": point.queued,
        "active": point.active,
        "requests_per_s": point.requests_per_s,
        "tokens_per_s": point.tokens_per_s,
        **{name: list(quantiles) for name, quantiles in point.quantiles.items()},
    }


def _traced(view: RequestView) -> TracedRequest:
    about = ("state", "error", "prompt_tokens", "cached_tokens", "output_tokens", "attempts", "migrations", "placement")
    values = asdict(view)
    return TracedRequest(
        name=view.request_id,
        start_s=view.arrival_s,
        stages=view.stages,
        prefill_worker=view.prefill_worker,
        decode_worker=view.decode_worker,
        about={key: values[key] for key in about},
    )
