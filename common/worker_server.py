"""What every worker process is from the outside: a gRPC server that is a member at one or several routers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Protocol

import grpc

from common.cache_feed import CacheFeed, CacheSource
from common.cluster_access import ClusterAccess, bind_cluster_port, new_cluster_server
from common.config import Role, ServeConfig
from common.drain import Drain
from common.kv_layout import KVLayout
from common.link_status import LinkSource, link_statuses
from common.membership import Membership, Report, ReportSource
from common.metrics_server import MetricsServer
from common.pb import serving_pb2 as pb
from common.standard_services import add_standard_services
from common.tracing import NO_TRACER, Tracer
from common.worker_metrics import exposition

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

STOP_GRACE_S = 1.0
ROLES = {Role.PREFILL: pb.ROLE_PREFILL, Role.DECODE: pb.ROLE_DECODE, Role.COLOCATED: pb.ROLE_COLOCATED}


class WorkerServer:
    """Serves a worker's services and keeps it registered, until stopped.

    `services` maps each full service name to the function that adds its servicer to a server.
    """

    def __init__(
        self,
        services: dict[str, Callable[[grpc.aio.Server], None]],
        drain: Drain,
        access: ClusterAccess,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        """tracer: closed at the end, so that the last spans are sent."""
        self._services = services
        self._tracer = tracer
        self._drain = drain
        self._access = access
        self._server = new_cluster_server(access)
        self._memberships: list[Membership] = []
        self._metrics: MetricsServer | None = None

    def bind(self, host: str) -> str:
        """Take a free port before serving; routers learn the address from the hello."""
        return bind_cluster_port(self._server, host, 0, self._access)

    async def start(self, hello: pb.WorkerHello, routers: list[str], reports: ReportSource) -> None:
        """routers: the control addresses of all that may give it work. Each hears of it on a stream of its own."""
        for add in self._services.values():
            add(self._server)
        await add_standard_services(self._server, list(self._services))
        await self._server.start()
        self._memberships = [
            Membership(router, hello, reports, self._told_to_drain, self._access) for router in routers
        ]
        logger.info("%s serves on %s, incarnation %s", hello.worker_id, hello.address, hello.incarnation)

    async def serve_metrics(self, metrics: MetricsServer, status: StatusSource) -> None:
        """Until `stop`, beside what is served over gRPC."""
        self._metrics = metrics
        await metrics.start(status.exposition)

    async def leave(self) -> None:
        """Leave the routers, so that nothing new arrives. Safe to call twice."""
        await asyncio.gather(*(membership.close() for membership in self._memberships))

    async def stop(self) -> None:
        """End what is running, then the server."""
        await self.leave()
        if self._metrics is not None:
            await self._metrics.stop()
        await self._server.stop(STOP_GRACE_S)
        await self._tracer.close()

    def _told_to_drain(self, timeout_s: float) -> None:
        self._drain.begin(timeout_s or None)


class LoadSource(CacheSource, Protocol):
    """What a worker's engine tells of itself: engine/async_engine.py in every real worker."""

    @property
    def layout(self) -> KVLayout: ...

    @property
    def limits(self) -> DataclassInstance:
        """With the fields of pb.WorkerHello that bear their names."""

    async def load(self) -> DataclassInstance:
        """With the fields of pb.WorkerLoad that bear their names."""


class LoadReports:
    """A worker's load as messages: for whoever asks, and for its routers, which also hear of prefix cache and links."""

    def __init__(self, source: LoadSource, links: LinkSource, drain: Drain) -> None:
        self._source = source
        self._links = links
        self._drain = drain
        self._cache = CacheFeed(source)

    async def measure(self) -> pb.WorkerLoad:
        return pb.WorkerLoad(
            **asdict(await self._source.load()), is_draining=self._drain.is_draining, clock_s=time.time()
        )

    @contextmanager
    def listening(self) -> Iterator[Report]:
        """As Membership wants it."""
        with self._cache.listening() as cache_news:

            async def report() -> pb.WorkerLoad:
                load = await self.measure()
                news = await cache_news()
                load.stored_blocks.extend(news.stored)
                load.evicted_blocks.extend(news.evicted)
                load.links.extend(link_statuses(self._links))
                return load

            yield report

    def hello(self, config: ServeConfig, role: Role, identity: WorkerIdentity) -> pb.WorkerHello:
        return pb.WorkerHello(
            worker_id=identity.name,
            role=ROLES[role],
            incarnation=identity.incarnation,
            address=identity.address,
            metrics_address=identity.metrics_address,
            model=config.model.served_name,
            layout=self._source.layout.to_pb(),
            transport=config.transfer.transport,
            wire_dtype=config.transfer.wire_dtype,
            **asdict(self._source.limits),
        )


@dataclass(frozen=True)
class WorkerIdentity:
    name: str  # stable over restarts
    incarnation: str
    address: str
    metrics_address: str


class StatusSource:
    """What either kind of worker tells of itself: to GetStatus, and to Prometheus."""

    def __init__(
        self,
        hello: pb.WorkerHello,
        measure_load: Callable[[], Awaitable[pb.WorkerLoad]],
        counters: Callable[[], dict[str, int]],
        links: LinkSource,
    ) -> None:
        self._hello = hello
        self._measure_load = measure_load
        self._counters = counters
        self._links = links
        self._start_s = time.monotonic()

    async def status(self) -> pb.WorkerStatus:
        return pb.WorkerStatus(
            hello=self._hello,
            load=await self._measure_load(),
            counters=self._counters(),
            uptime_s=time.monotonic() - self._start_s,
            links=link_statuses(self._links),
        )

    async def exposition(self) -> bytes:
        return exposition(await self.status())
