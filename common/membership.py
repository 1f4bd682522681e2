"""A worker's membership: one open stream to the router, a hello and then its load at every heartbeat."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc

from common.cluster_access import ClusterAccess, connect
from common.pb import serving_pb2 as pb
from common.pb import serving_pb2_grpc as pb_grpc

logger = logging.getLogger(__name__)

HEARTBEAT_S = 0.25
RECONNECT_S = 0.25


class Membership:
    """Keeps one worker registered at one router, through every restart of that router."""

    def __init__(
        self,
        router_address: str,
        hello: pb.WorkerHello,
        report: Callable[[bool], Awaitable[pb.WorkerLoad]],
        access: ClusterAccess,
    ) -> None:
        """report(True) opens a membership: its cached blocks are all there are, afterwards only what changed."""
        self._router_address = router_address
        self._hello = hello
        self._report = report
        self._access = access
        self._task = asyncio.create_task(self._run(), name="membership")

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        async with connect(self._router_address, self._access) as channel:
            registry = pb_grpc.RegistryStub(channel)
            told = None
            while True:
                try:
                    async for _ in registry.Register(self._reports(), wait_for_ready=True):
                        logger.info("%s registered at the router %s", self._hello.worker_id, self._router_address)
                        told = None
                except grpc.aio.AioRpcError as error:
                    if error.details() != told:  # once, not at every try
                        logger.warning("not registered at %s: %s", self._router_address, error.details())
                    told = error.details()
                await asyncio.sleep(RECONNECT_S)

    async def _reports(self) -> AsyncIterator[pb.WorkerReport]:
        yield pb.WorkerReport(hello=self._hello)
        yield pb.WorkerReport(load=await self._report(True))
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            yield pb.WorkerReport(load=await self._report(False))
