"""The Prefill gRPC service."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from common.call_trace import CallStages, CallTrace
from common.drain import Drain
from common.lifecycle import Stage
from common.pb import serving_pb2 as pb
from common.pb import serving_pb2_grpc as pb_grpc
from common.rpc import answering
from common.tracing import Tracer
from common.worker_server import StatusSource
from prefill_worker.worker import PrefillWorker

STAGES = CallStages(Stage.PREFILL_QUEUE, {"started": Stage.PREFILL, "first_token": Stage.TRANSFER})


class PrefillService(pb_grpc.PrefillServicer):
    def __init__(self, worker: PrefillWorker, drain: Drain, status: StatusSource, tracer: Tracer) -> None:
        self._worker = worker
        self._drain = drain
        self._status = status
        self._trace = CallTrace(tracer, "prefill_worker")

    async def Run(
        self, request: pb.PrefillRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.PrefillEvent]:
        traced = self._trace.over(self._drain.work(self._worker.run(request)), STAGES, context)
        async with answering(context), aclosing(traced) as events:
            async for event in events:
                yield event

    async def GetStatus(
        self, request: pb.WorkerStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.WorkerStatus:
        return await self._status.status()
