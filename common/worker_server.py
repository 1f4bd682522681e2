"""What every worker process is from the outside: a gRPC server that is a member at a router."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Protocol

import grpc

from common.cluster_access import ClusterAccess, bind_cluster_port, new_cluster_server
from common.config import Role, ServeConfig
from common.kv_layout import KVLayout
from common.link_status import LinkSource, link_statuses
from common.membership import Membership
from common.pb import serving_pb2 as pb
from common.standard_services import add_standard_services

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

STOP_GRACE_S = 1.0
ROLES = {Role.PREFILL: pb.ROLE_PREFILL, Role.DECODE: pb.ROLE_DECODE, Role.COLOCATED: pb.ROLE_COLOCATED}


class WorkerServer:
    """Serves a worker's services and keeps it registered, until stopped.

    `services` maps each full service name to the function that adds its servicer to a server.
    """

    def __init__(self, services: dict[str, Callable[[grpc.aio.Server], None]], access: ClusterAccess) -> None:
        self._services = services
        self._access = access
        self._server = new_cluster_server(access)
        self._membership: Membership | None = None

    def bind(self, host: str) -> str:
        """Take a free port before serving; the router learns the address from the hello."""
        return bind_cluster_port(self._server, host, 0, self._access)

    async def start(
        self, hello: pb.WorkerHello, router_address: str, report: Callable[[bool], Awaitable[pb.WorkerLoad]]
    ) -> None:
        """`report` as Membership takes it."""
        for add in self._services.values():
            add(self._server)
        await add_standard_services(self._server, list(self._services))
        await self._server.start()
        self._membership = Membership(router_address, hello, report, self._access)
        logger.info("%s serves on %s, incarnation %s", hello.worker_id, hello.address, hello.incarnation)

    async def leave(self) -> None:
        """Leave the router, so that nothing new arrives. Safe to call twice."""
        if self._membership is not None:
            await self._membership.close()

    async def stop(self) -> None:
        """End what is running, then the server."""
        await self.leave()
        await self._server.stop(STOP_GRACE_S)


class LoadSource(Protocol):
    """What a worker's engine tells of itself: engine/async_engine.py in every real worker."""

    @property
    def layout(self) -> KVLayout: ...

    @property
    def limits(self) -> DataclassInstance:
        """With the fields of pb.WorkerHello that bear their names."""

    async def load(self) -> DataclassInstance:
        """With the fields of pb.WorkerLoad that bear their names."""

    async def cache_events(self, *, as_snapshot: bool) -> CacheEvents: ...


class CacheEvents(Protocol):
    @property
    def stored(self) -> list[bytes]: ...

    @property
    def evicted(self) -> list[bytes]: ...


class LoadReports:
    """A worker's load as messages: for whoever asks, and for the router, which also hears of prefix cache and links."""

    def __init__(self, source: LoadSource, links: LinkSource) -> None:
        self._source = source
        self._links = links

    async def measure(self) -> pb.WorkerLoad:
        return pb.WorkerLoad(**asdict(await self._source.load()))

    async def report(self, is_first: bool) -> pb.WorkerLoad:
        """As Membership wants it."""
        load = await self.measure()
        events = await self._source.cache_events(as_snapshot=is_first)
        load.stored_blocks.extend(events.stored)
        load.evicted_blocks.extend(events.evicted)
        load.links.extend(link_statuses(self._links))
        return load

    def hello(self, config: ServeConfig, role: Role, identity: WorkerIdentity) -> pb.WorkerHello:
        return pb.WorkerHello(
            worker_id=identity.name,
            role=ROLES[role],
            incarnation=identity.incarnation,
            address=identity.address,
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


class StatusSource:
    """Answers GetStatus for either kind of worker."""

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
