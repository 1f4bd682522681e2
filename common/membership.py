"""A worker's membership at one router: one open stream, a hello and then its load at every heartbeat."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Protocol

import grpc

from common.pb import serving_pb2 as pb
from common.pb import serving_pb2_grpc as pb_grpc
from common.rpc import new_channel

logger = logging.getLogger(__name__)

HEARTBEAT_S = 0.25
RECONNECT_S = 0.25

Report = Callable[[], Awaitable[pb.WorkerLoad]]


class ReportSource(Protocol):
    def listening(self) -> AbstractContextManager[Report]:
        """For one membership: the first report tells of all cached blocks, each later one of what has changed."""


class Membership:
    """Keeps one worker registered at one router, through every restart of that router."""

    def __init__(
        self, router_address: str, hello: pb.WorkerHello, reports: ReportSource, on_drain: Callable[[float], None]
    ) -> None:
        """on_drain: the router passes on the wish that this worker leaves, with its bound in seconds; 0: no bound."""
        self._router_address = router_address
        self._hello = hello
        self._source = reports
        self._on_drain = on_drain
        self._task = asyncio.create_task(self._run(), name=f"membership at {router_address}")

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        async with new_channel(self._router_address) as channel:
            registry = pb_grpc.RegistryStub(channel)
            told = None
            while True:
                try:
                    with self._source.listening() as report:
                        async for reply in registry.Register(self._reports(report), wait_for_ready=True):
                            told = None
                            self._heed(reply)
                except grpc.aio.AioRpcError as error:
                    if error.details() != told:  # once, not at every try
                        logger.warning("not registered at %s: %s", self._router_address, error.details())
                    told = error.details()
                await asyncio.sleep(RECONNECT_S)

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
