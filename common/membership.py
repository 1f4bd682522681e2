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
LEAVE_S = 0.5  # for the last word
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
        self._is_registered = False
        self._leaving: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(), name=f"membership at {router_address}")

    @property
    def is_registered(self) -> bool:
        return self._is_registered

    async def close(self) -> None:
        """Says a last word, which tells whether this worker was drained or just ends. Safe to call twice."""
        if not self._leaving.done():
            self._leaving.set_result(None)
        if self._is_registered:
            await asyncio.wait({self._task}, timeout=LEAVE_S)
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
                            self._is_registered = True
                            self._heed(reply)
                except grpc.aio.AioRpcError as error:
                    if error.details() not in told:  # once, not at every try
                        logger.warning("not registered at %s: %s", self._router_address, error.details())
                    told.add(error.details())
                    if error.code() in REFUSED:
                        pause_s = REFUSED_S
                self._is_registered = False
                if await self._leaves_within(pause_s):
                    return

    def _heed(self, reply: pb.RegisterReply) -> None:
        if reply.router_incarnation:
            logger.info("%s registered at the router %s", self._hello.worker_id, self._router_address)
        if reply.HasField("drain"):
            self._on_drain(reply.drain.timeout_s)

    async def _reports(self, report: Report) -> AsyncIterator[pb.WorkerReport]:
        yield pb.WorkerReport(hello=self._hello)
        is_last = False
        while not is_last:
            is_last = self._leaving.done()
            yield pb.WorkerReport(load=await report())
            if not is_last:
                await self._leaves_within(HEARTBEAT_S)

    async def _leaves_within(self, seconds: float) -> bool:
        await asyncio.wait({self._leaving}, timeout=seconds)
        return self._leaving.done()
