"""A worker's membership at one router: one open stream, a hello and then its load at every heartbeat."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Protocol

import grpc

from common.cluster_access import ClusterAccess, connect
from common.pb import serving_pb2 as pb
from common.pb import serving_pb2_grpc as pb_grpc

logger = logging.getLogger(__name__)

HEARTBEAT_S = 0.25
RECONNECT_S = 0.25
# Somebody has to change a file first. INTERNAL: gRPC's word for a refusal that met our first report on the way.
REFUSED, REFUSED_S = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.INTERNAL), 2.0

Report = Callable[[], Awaitable[pb.WorkerLoad]]


class ReportSource(Protocol):
    def listening(self) -> AbstractContextManager[Report]:
        """For one membership: the first report tells of all cached blocks, each later one of what has changed."""


class Membership:
    """Keeps one worker registered at one router, through every restart of that router."""

    def __init__(
        self,
        router_address: str,
        hello: pb.WorkerHello,
        reports: ReportSource,
        on_drain: Callable[[float], None],
        access: ClusterAccess,
    ) -> None:
        """on_drain: the router passes on the wish that this worker leaves, with its bound in seconds; 0: no bound."""
        self._router_address = router_address
        self._hello = hello
        self._source = reports
        self._on_drain = on_drain
        self._access = access
        self._task = asyncio.create_task(self._run(), name=f"membership at {router_address}")

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        async with connect(self._router_address, self._access) as channel:
            registry = pb_grpc.RegistryStub(channel)
            told: set[str | None] = set()
            while True:
                pause_s = RECONNECT_S
                try:
                    with self._source.listening() as report:
                        async for reply in registry.Register(self._reports(report), wait_for_ready=True):
                            told.clear()
                            self._heed(reply)
                except grpc.aio.AioRpcError as error:
                    if error.details() not in told:  # once, not at every try
                        logger.warning("not registered at %s: %s", self._router_address, error.details())
                    told.add(error.details())
                    if error.code() in REFUSED:
                        pause_s = REFUSED_S
                await asyncio.sleep(pause_s)

    def _heed(self, reply: pb.RegisterReply) -> None:
        if reply.router_incarnation:
            logger.info("%s registered at the router %s", self._hello.worker_id, self._router_address)
        if reply.HasField("drain"):
            self._on_drain(reply.drain.timeout_s)

    async def _reports(self, report: Report) -> AsyncIterator[pb.WorkerReport]:
        yield pb.WorkerReport(hello=self._hello)
        while True:
            yield pb.WorkerReport(load=await report())
            await asyncio.sleep(HEARTBEAT_S)
