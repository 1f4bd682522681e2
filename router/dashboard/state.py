"""What the page is told once a second, as orjson writes it. Numbers bear the names that they have in /metrics, and come
from the same places."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any

from common.chrome_trace import TracedRequest, chrome_trace
from common.errors import ServingError
from common.identity import new_incarnation
from common.pb import serving_pb2 as pb
from router.cluster_metrics import link_values, worker_values
from router.dashboard.history import LATENCIES, QUANTILES, TICK_S, History, Load, Point
from router.dashboard.reading import Reading
from router.dashboard.requests import RecentRequests, RequestView
from router.dashboard.roster import Gone, Roster
from router.metrics import RouterMetrics
from router.request import Request
from router.worker import ROLES, Worker

JsonObject = dict[str, Any]

TOTALS = (
    *("requests_total", "request_retries_total", "request_migrations_total", "refusals_total"),
    *("prompt_tokens_total", "output_tokens_total"),
)
TABLES = ("requests_total", "placements_total", "request_retries_total", "refusals_total", "pair_checks_total")
MAX_REQUESTS = 24
STANDINGS = {pb.PAIR_UNCHECKED: "unchecked", pb.PAIR_GOOD: "good", pb.PAIR_REFUSED: "refused"}


class Dashboard:
    """Call `run` as a task for as long as the router serves."""

    def __init__(
        self,
        status: Callable[[], pb.ClusterStatus],
        metrics: RouterMetrics,
        load: Callable[[], Load],
        running: Callable[[], Iterable[Request]],
    ) -> None:
        self._status = status
        self._metrics = metrics
        self._load = load
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
        self._history.note(Reading(self._metrics.own), self._load(), time.time())

    def request_ended(self, request: Request, error: ServingError | None) -> None:
        self._recent.add(request, error)

    def worker_left(self, worker: Worker) -> None:
        self._roster.left(worker.hello, has_drained=worker.is_draining)

    def state(self, after: int = 0) -> JsonObject:
        """after: the number of the last point of the history that the page has; 0: it has none."""
        status, reading = self._status(), Reading(self._metrics.own)
        members = {worker.hello.worker_id for worker in status.workers}
        return {
            "router": self._router,  # another one: what the page remembers is of another process
            "time_s": time.time(),
            "model": status.model,
            "is_ready": status.is_ready,
            "reason": status.reason,
            "uptime_s": status.uptime_s,
            "totals": {
                "queued_requests": status.num_queued,
                "active_requests": status.num_active,
                **{name: reading.total(name) for name in TOTALS},
            },
            "tables": {
                name: [{"labels": labels, "value": value} for labels, value in reading.rows(name)] for name in TABLES
            },
            "latencies": {name: _latency(reading, name, self._history.last) for name in LATENCIES},
            "workers": [*map(_member, status.workers), *map(_gone, self._roster.gone(members))],
            "pairs": [_pair(pair) for pair in status.pairs],
            "requests": self._recent.views(self._running())[:MAX_REQUESTS],
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


def _member(worker: pb.WorkerSummary) -> JsonObject:
    return _identity(worker.hello) | {
        "state": "unfit" if worker.unfit_reason else "fit",
        "reason": worker.unfit_reason,
        "metrics": worker_values(worker),
    }


def _gone(gone_for: tuple[Gone, float]) -> JsonObject:
    gone, seconds = gone_for
    state, reason = ("left", "it had drained") if gone.has_drained else ("gone", "its connection ended")
    return _identity(gone.hello) | {"state": state, "reason": reason, "gone_s": seconds, "metrics": {}}


def _identity(hello: pb.WorkerHello) -> JsonObject:
    return {
        "worker": hello.worker_id,
        "role": ROLES[hello.role],
        "address": hello.address,
        "metrics_address": hello.metrics_address,
        "incarnation": hello.incarnation,
    }


def _pair(pair: pb.PairSummary) -> JsonObject:
    return {
        "prefill": pair.prefill_worker,
        "decode": pair.decode_worker,
        "standing": STANDINGS.get(pair.standing, "unknown"),
        "reason": pair.reason,
        "transport": pair.link.transport,
        "metrics": link_values(pair),
    }


def _point(point: Point) -> JsonObject:
    return {
        "number": point.number,
        "time_s": point.time_s,
        "queued": point.load.queued,
        "active": point.load.active,
        "requests_per_s": point.requests_per_s,
        "tokens_per_s": point.tokens_per_s,
        **point.quantiles,
    }


def _traced(view: RequestView) -> TracedRequest:
    about = ("state", "error", "prompt_tokens", "cached_tokens", "output_tokens", "attempts", "migrations", "placement")
    values = vars(view)
    return TracedRequest(
        name=view.request_id,
        start_s=view.arrival_s,
        stages=view.stages,
        prefill_worker=view.prefill_worker,
        decode_worker=view.decode_worker,
        about={key: values[key] for key in about},
    )
