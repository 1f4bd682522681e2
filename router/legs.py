"""The gRPC calls that a request, or the check of a pair, consists of. Leaving a call's block cancels the call, which
frees the worker's side of it."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from common.errors import ServingError, WorkerLost
from common.pb import kv_transfer_pb2 as kv_pb
from common.pb import serving_pb2 as pb
from common.sampling import SamplingParams
from common.tracing import NO_CARRIER, Carrier
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
    trace: Carrier = NO_CARRIER  # that the workers' spans are part of

    @property
    def timeout_s(self) -> float:
        return max(0.001, self.deadline_s - time.monotonic())


class DecodeLeg:
    """An open Generate call on a decode worker: the reservation, then the stream of tokens."""

    def __init__(self, worker: Worker, events: AsyncIterator[pb.DecodeEvent]) -> None:
        self._worker = worker
        self._events = events
        self._has_decoded = False

    async def next(self) -> pb.DecodeEvent:
        """Raises: WorkerLost also when the stream ends; whoever reads knows when it may."""
        event = await anext(self._events)
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
        metadata=attempt.trace,
    )
    try:
        async with aclosing(_events_of(worker, call)) as events:
            yield DecodeLeg(worker, events)
    finally:
        call.cancel()


class CheckLeg:
    """An open CheckPair call on a decode worker: the reservation, then the verdict."""

    def __init__(self, events: AsyncIterator[pb.PairCheckEvent]) -> None:
        self._events = events

    async def reserved(self) -> pb.Reserved:
        return (await anext(self._events)).reserved

    async def verdict(self) -> pb.PairVerdict:
        return (await anext(self._events)).verdict


@asynccontextmanager
async def check_leg(worker: Worker, attempt: Attempt, source_dtype: str) -> AsyncIterator[CheckLeg]:
    """source_dtype: in which the prefill worker computes."""
    request = pb.PairCheckRequest(
        token_ids=attempt.token_ids, transfer_id=attempt.transfer_id, source_dtype=source_dtype
    )
    call = worker.decode.CheckPair(request, timeout=attempt.timeout_s)
    try:
        async with aclosing(_events_of(worker, call)) as events:
            yield CheckLeg(events)
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
        metadata=attempt.trace,
    )
    try:
        with worker.called():
            async for event in call:
                if event.HasField("first_token"):
                    worker.breaker.succeeded()
                yield event
    finally:
        call.cancel()


async def _events_of(worker: Worker, call: AsyncIterable[E]) -> AsyncGenerator[E, None]:
    """Never ends by itself: whoever reads knows when it may."""
    with worker.called():
        async for event in call:
            yield event
        raise WorkerLost(f"{worker.worker_id} ended its stream too early")
