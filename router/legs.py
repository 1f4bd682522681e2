"""The gRPC calls that a request, or the check of a pair, consists of. Leaving a call's block cancels the call, which
frees the worker's side of it."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import grpc

from common.errors import ServingError, WorkerLost
from common.pb import kv_transfer_pb2 as kv_pb
from common.pb import serving_pb2 as pb
from common.sampling import SamplingParams
from router.worker import Worker

E = TypeVar("E")


@dataclass(frozen=True)
class Attempt:
    """What the workers are asked for: the prompt, with every token that an earlier attempt already gave."""

    request_id: str
    transfer_id: bytes
    token_ids: list[int]
    sampling: SamplingParams
    deadline_s: float  # time.monotonic()
    cache_salt: bytes = b""  # prompts of different salts never share cached KV

    @property
    def timeout_s(self) -> float:
        return max(0.001, self.deadline_s - time.monotonic())


class DecodeLeg:
    """An open Generate call on a decode worker: the reservation, then the stream of tokens."""

    def __init__(self, worker: Worker, call: grpc.aio.UnaryStreamCall[pb.DecodeRequest, pb.DecodeEvent]) -> None:
        self._worker = worker
        self._events = aiter(call)
        self._has_decoded = False

    async def next(self) -> pb.DecodeEvent:
        """Raises: WorkerLost also when the stream ends; whoever reads knows when it may."""
        event = await _next_event(self._worker, self._events)
        if not self._has_decoded and event.HasField("token"):
            self._has_decoded = True
            self._worker.breaker.succeeded()
        return event

    async def reserved(self) -> pb.Reserved:
        event = await self.next()
        if not event.HasField("reserved"):
            raise ServingError(f"{self._worker.worker_id} answered a reservation with {event.WhichOneof('event')}")
        return event.reserved


@asynccontextmanager
async def decode_leg(worker: Worker, attempt: Attempt, *, compute_prompt: bool) -> AsyncIterator[DecodeLeg]:
    call = worker.decode.Generate(
        pb.DecodeRequest(
            request_id=attempt.request_id,
            token_ids=attempt.token_ids,
            sampling=attempt.sampling.to_pb(),
            transfer_id=b"" if compute_prompt else attempt.transfer_id,
            compute_prompt=compute_prompt,
            cache_salt=attempt.cache_salt,
        ),
        timeout=attempt.timeout_s,
    )
    try:
        yield DecodeLeg(worker, call)
    finally:
        call.cancel()


class CheckLeg:
    """An open CheckPair call on a decode worker: the reservation, then the verdict."""

    def __init__(self, worker: Worker, call: grpc.aio.UnaryStreamCall[pb.PairCheckRequest, pb.PairCheckEvent]) -> None:
        self._worker = worker
        self._events = aiter(call)

    async def reserved(self) -> pb.Reserved:
        return (await _next_event(self._worker, self._events)).reserved

    async def verdict(self) -> pb.PairVerdict:
        return (await _next_event(self._worker, self._events)).verdict


@asynccontextmanager
async def check_leg(worker: Worker, attempt: Attempt, source_dtype: str) -> AsyncIterator[CheckLeg]:
    """source_dtype: in which the prefill worker computes."""
    request = pb.PairCheckRequest(
        token_ids=attempt.token_ids, transfer_id=attempt.transfer_id, source_dtype=source_dtype
    )
    call = worker.decode.CheckPair(request, timeout=attempt.timeout_s)
    try:
        yield CheckLeg(worker, call)
    finally:
        call.cancel()


async def prefill_events(
    worker: Worker, attempt: Attempt, number: int, reserved: pb.Reserved
) -> AsyncGenerator[pb.PrefillEvent, None]:
    """One Run call on a prefill worker. `number` tells apart several tries at one transfer."""
    ticket = kv_pb.Ticket(
        transfer_id=attempt.transfer_id,
        attempt=number,
        source_incarnation=worker.hello.incarnation,
        destination_incarnation=reserved.destination.incarnation,
        num_tokens=len(attempt.token_ids),
        skip_tokens=reserved.skip_tokens,
    )
    call = worker.prefill.Run(
        pb.PrefillRequest(
            request_id=attempt.request_id,
            token_ids=attempt.token_ids,
            sampling=attempt.sampling.to_pb(),
            ticket=ticket,
            destination=reserved.destination,
            cache_salt=attempt.cache_salt,
        ),
        timeout=attempt.timeout_s,
    )
    try:
        with worker.called():
            async for event in call:
                if event.HasField("first_token"):
                    worker.breaker.succeeded()
                yield event
    finally:
        call.cancel()


async def _next_event(worker: Worker, events: AsyncIterator[E]) -> E:
    with worker.called():
        async for event in events:
            return event
        raise WorkerLost(f"{worker.worker_id} ended its stream too early")
