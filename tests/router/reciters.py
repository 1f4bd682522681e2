"""Workers that recite a given answer from wherever they are asked to go on, and die where they are told to."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc

from common.errors import ServingError
from common.kv_layout import KVLayout
from common.pb import kv_transfer_pb2 as kv_pb
from common.pb import serving_pb2 as pb
from common.pb import serving_pb2_grpc as pb_grpc
from common.rpc import answering, bind_port, new_server
from router.registry import Registry
from router.worker import Worker

ROLES = {"prefill": pb.ROLE_PREFILL, "decode": pb.ROLE_DECODE}


class Reciters(pb_grpc.PrefillServicer, pb_grpc.DecodeServicer):
    """All workers behind one address. `decode_faults` and `prefill_faults` meet the calls in their order."""

    def __init__(self, num_prompt_tokens: int, answer: Sequence[int]) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._answer = answer
        self._handed_over: dict[bytes, asyncio.Event] = defaultdict(asyncio.Event)
        self.decode_faults: list[tuple[int, ServingError] | None] = []  # after how many tokens
        self.prefill_faults: list[ServingError | None] = []  # instead of the hand-over, its first token being out
        self.decodes: list[pb.DecodeRequest] = []
        self.cached_tokens = [0] * 100  # of the prefills, in their order

    async def Run(
        self, request: pb.PrefillRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.PrefillEvent]:
        fault = self.prefill_faults.pop(0) if self.prefill_faults else None
        async with answering(context):
            yield pb.PrefillEvent(started=pb.PrefillStarted(cached_tokens=self.cached_tokens.pop(0)))
            yield pb.PrefillEvent(first_token=self._token(request.token_ids, 0, request.sampling.max_tokens))
            if fault is not None:
                raise fault
            self._handed_over[request.ticket.transfer_id].set()
            yield pb.PrefillEvent(done=pb.PrefillDone())

    async def Generate(
        self, request: pb.DecodeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.DecodeEvent]:
        self.decodes.append(request)
        fault = self.decode_faults.pop(0) if self.decode_faults else None
        async with answering(context):
            yield pb.DecodeEvent(reserved=pb.Reserved(destination=kv_pb.Destination(incarnation="d")))
            if fault is not None and fault[0] == 0:
                raise fault[1]
            await self._handed_over[request.transfer_id].wait()
            yield pb.DecodeEvent(started=pb.DecodeStarted())
            for index in range(1, request.sampling.max_tokens):
                if fault is not None and index > fault[0]:
                    raise fault[1]
                yield pb.DecodeEvent(token=self._token(request.token_ids, index, request.sampling.max_tokens))

    def _token(self, token_ids: Sequence[int], index: int, max_tokens: int) -> pb.SampledToken:
        position = len(token_ids) - self._num_prompt_tokens + index
        return pb.SampledToken(
            token_id=self._answer[position], finish_reason="length" if index + 1 == max_tokens else ""
        )


@asynccontextmanager
async def reciting(reciters: Reciters, registry: Registry, names: Sequence[str]) -> AsyncIterator[list[Worker]]:
    """Members of `registry` that are heard of all the time."""
    server = new_server()
    pb_grpc.add_PrefillServicer_to_server(reciters, server)
    pb_grpc.add_DecodeServicer_to_server(reciters, server)
    address = bind_port(server, "127.0.0.1", 0)
    await server.start()
    workers = [_worker(name, address) for name in names]
    for worker in workers:
        registry.join(worker)
    heartbeats = asyncio.create_task(_heartbeats(registry, workers))
    try:
        yield workers
    finally:
        heartbeats.cancel()
        await asyncio.gather(heartbeats, return_exceptions=True)
        for worker in workers:
            registry.leave(worker)
            await worker.close_when_idle()
        await server.stop(None)


async def _heartbeats(registry: Registry, workers: Sequence[Worker]) -> None:
    while True:
        for worker in workers:
            registry.heard(worker, pb.WorkerLoad(free_blocks=1000, total_blocks=1000))
        await asyncio.sleep(0.01)


def _worker(name: str, address: str) -> Worker:
    return Worker(
        pb.WorkerHello(
            worker_id=name,
            role=ROLES[name.partition("-")[0]],
            incarnation=f"incarnation of {name}",
            model="tiny",
            layout=KVLayout("f00d", 4, 2, 8, "float32", "theta=10000").to_pb(),
            address=address,
            vocab_size=49152,
            max_model_len=1600,
            max_num_seqs=8,
            kv_capacity_tokens=16000,
            block_size=16,
        )
    )
