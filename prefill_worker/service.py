"""The Prefill gRPC service."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from common.drain import Drain
from common.pb import serving_pb2 as pb
from common.pb import serving_pb2_grpc as pb_grpc
from common.rpc import answering
from common.worker_server import StatusSource
from prefill_worker.worker import PrefillWorker


class PrefillService(pb_grpc.PrefillServicer):
    def __init__(self, worker: PrefillWorker, drain: Drain, status: StatusSource) -> None:
        self._worker = worker
        self._drain = drain
        self._status = status

    async def Run(
        self, request: pb.PrefillRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.PrefillEvent]:
        async with answering(context), aclosing(self._drain.work(self._worker.run(request))) as events:
            async for event in events:
                yield event

    async def GetStatus(
        self, request: pb.WorkerStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.WorkerStatus:
        return await self._status.status()
