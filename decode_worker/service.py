"""The Decode gRPC service: the open Generate stream is the reservation."""

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
from decode_worker.pair_check import PairCheck
from decode_worker.worker import DecodeWorker

RECEIVES_KV = CallStages(
    Stage.RESERVE, {"reserved": Stage.TRANSFER, "started": Stage.DECODE_WAIT, "token": Stage.DECODE}
)
COMPUTES_PROMPT = CallStages(Stage.PREFILL_QUEUE, {"started": Stage.PREFILL, "token": Stage.DECODE})


class DecodeService(pb_grpc.DecodeServicer):
    def __init__(
        self, worker: DecodeWorker, pair_check: PairCheck, drain: Drain, status: StatusSource, tracer: Tracer
    ) -> None:
        self._worker = worker
        self._pair_check = pair_check
        self._drain = drain
        self._status = status
        self._trace = CallTrace(tracer, "decode_worker")

    async def Generate(
        self, request: pb.DecodeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.DecodeEvent]:
        stages = COMPUTES_PROMPT if request.compute_prompt else RECEIVES_KV
        traced = self._trace.over(self._drain.work(self._worker.generate(request)), stages, context)
        async with answering(context), aclosing(traced) as events:
            async for event in events:
                yield event

    async def CheckPair(
        self, request: pb.PairCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.PairCheckEvent]:
        async with answering(context), aclosing(self._drain.work(self._pair_check.run(request))) as events:
            async for event in events:
                yield event

    async def GetStatus(
        self, request: pb.WorkerStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.WorkerStatus:
        return await self._status.status()
