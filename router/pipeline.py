"""The whole journey of a request, and the only place where anything is tried again (retries.py says whether).

    queue → choose (P, D) → reserve on D → prefill on P ═ KV ═▶ D → first token from P → the rest from D

`serve` runs the journey as one task and streams its tokens; when the stream is closed the task is cancelled, and with
it both legs. Inside, each leg is one gRPC call: cancelling the call is what frees the worker's side of it.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from common.errors import DeadlineExceeded, NoFreeBlocks, QueueFull, ServingError, WorkerDraining, WorkerLost
from common.identity import new_transfer_id
from common.lifecycle import Stage, State
from common.pb import serving_pb2 as pb
from common.sampling import FinishReason
from common.tracing import NO_TRACER, Attributes, Tracer
from router.admission import Admission
from router.legs import Attempt, DecodeLeg, decode_leg, prefill_events
from router.metrics import RouterMetrics
from router.placement import Placement
from router.request import Request, TokenDelta
from router.retries import RETRIED, GivenUp, Retries
from router.tenant import Tenant

# A worker that turned out full says so again until it has freed something: about a heartbeat.
FULL_WORKER_PAUSE_S = 0.25

Emit = Callable[[TokenDelta], None]


class RequestPipeline:
    def __init__(
        self, admission: Admission, metrics: RouterMetrics, retries: Retries, tracer: Tracer = NO_TRACER
    ) -> None:
        self._admission = admission
        self._tracer = tracer
        self._metrics = metrics
        self._retries = retries
        self._journeys: dict[asyncio.Task[None], Request] = {}
        self._is_draining = False
        self._is_closing = False

    async def serve(self, request: Request) -> AsyncGenerator[TokenDelta, None]:
        """The answer's tokens; the last one has a finish reason. Closing the stream cancels the request everywhere.

        Raises: a ServingError.
        """
        deltas: asyncio.Queue[TokenDelta | None] = asyncio.Queue()
        journey = asyncio.create_task(self._journey(request, deltas.put_nowait), name=request.request_id)
        journey.add_done_callback(lambda _: deltas.put_nowait(None))
        self._journeys[journey] = request
        try:
            while (delta := await deltas.get()) is not None:
                yield delta
            await journey
        finally:
            del self._journeys[journey]
            await _end(journey)

    def running(self) -> list[Request]:
        """From their first wait in the queue on."""
        return list(self._journeys.values())

    def require_room(self, tenant: Tenant) -> None:
        """Before a prompt costs anything. Raises: QueueFull when whatever this tenant sends now would be refused."""
        try:
            self._admission.require_room(tenant.name)
        except QueueFull as error:
            self._metrics.refusals.labels(type(error).__name__).inc()
            raise

    def begin_drain(self) -> None:
        """From now on new requests are refused with a typed error; those that run go on."""
        self._is_draining = True

    async def close(self) -> None:
        """The router stops: every running request ends with a typed error, and new ones do too."""
        self._is_closing = True
        await _end(*self._journeys)
        await self._tracer.close()

    async def _journey(self, request: Request, emit: Emit) -> None:
        """One request from QUEUED to its end, which is recorded here and nowhere else."""
        timeline = request.timeline
        span = self._tracer.begin("request", request.caller, timeline.arrival_s)
        request.caller = span.carrier
        error: ServingError | None = None
        try:
            self._require_open(is_new=True)
            await self._answer_in_time(request, emit)
            timeline.enter(State.FINISHED)
        except ServingError as failure:
            error = failure
            timeline.enter(State.FAILED)
            raise
        finally:
            if not timeline.is_ended:
                timeline.enter(State.FINISHED if request.ended_by_stop_string else State.CANCELLED)
            if timeline.num_output_tokens:
                self._retries.answered()
            self._metrics.record(request, error)
            span.end(timeline.intervals, _attributes(request), type(error).__name__ if error else "")

    async def _answer_in_time(self, request: Request, emit: Emit) -> None:
        """Raises: a ServingError also when the deadline passes or the router stops; CancelledError: the client left."""
        try:
            async with asyncio.timeout(request.deadline_s - time.monotonic()):
                await self._try_until_answered(request, emit)
        except GivenUp as end:
            raise end.error from None
        except TimeoutError:
            raise DeadlineExceeded(f"the deadline passed while the request was {request.timeline.state}") from None
        except asyncio.CancelledError:
            self._require_open()
            raise

    def _require_open(self, *, is_new: bool = False) -> None:
        if self._is_closing or (is_new and self._is_draining):
            raise WorkerDraining("the router is shutting down; send the request again")

    async def _try_until_answered(self, request: Request, emit: Emit) -> None:
        """Attempts. What was already emitted becomes part of the next attempt's prompt, so no token comes twice."""
        emitted: list[int] = []

        def emit_once(delta: TokenDelta) -> None:
            emitted.append(delta.token_id)
            self._metrics.note_token(request.timeline, request.timeline.count_token())
            emit(delta)

        is_retry = False
        while True:
            request.attempts += 1
            try:
                await self._attempt(request, emitted, emit_once, is_retry=is_retry)
                return
            except RETRIED as error:
                if request.timeline.state is State.QUEUED:  # nothing can serve it
                    raise
                self._retries.require(request, error)
                request.migrations += bool(emitted)
                request.timeline.enter(State.QUEUED)
            except NoFreeBlocks:
                request.attempts -= 1  # nothing failed: the worker filled up while we chose it
                request.timeline.enter(State.QUEUED)
                await asyncio.sleep(FULL_WORKER_PAUSE_S)
            is_retry = True

    async def _attempt(self, request: Request, emitted: list[int], emit: Emit, *, is_retry: bool) -> None:
        attempt = _attempt_at(request, emitted)
        async with self._admission.place(request, is_retry=is_retry) as placement:
            request.timeline.enter(State.RESERVING)
            request.decode_worker = placement.decode.worker_id
            self._note_placement(request, placement)
            async with decode_leg(placement.decode, attempt, compute_prompt=placement.is_local) as decode:
                if placement.is_local:
                    await self._local(request, placement, decode, emit)
                else:
                    await self._disaggregated(request, attempt, placement, decode, emit)

    def _note_placement(self, request: Request, placement: Placement) -> None:
        """Every decision is counted and told, never silent."""
        computed_by = "decode" if placement.is_local else "prefill"
        request.placement = f"{computed_by}: {placement.reason}"
        self._metrics.placements.labels(computed_by, placement.reason).inc()

    async def _local(self, request: Request, placement: Placement, decode: DecodeLeg, emit: Emit) -> None:
        """The decode worker computes the prompt itself: no prefill leg, no transfer."""
        timeline = request.timeline
        request.prefill_worker = ""
        timeline.enter(State.PREFILLING)
        async with self._admission.prefilling(placement):
            event = await decode.next()
            timeline.enter_stage(Stage.PREFILL)
            _note_cached(request, event.started.cached_tokens)
            delta = _delta((await decode.next()).token)
        emit(delta)
        if delta.finish_reason is None:
            timeline.enter(State.DECODING)
        while delta.finish_reason is None:
            delta = _delta((await decode.next()).token)
            emit(delta)

    async def _disaggregated(
        self, request: Request, attempt: Attempt, placement: Placement, decode: DecodeLeg, emit: Emit
    ) -> None:
        """Both legs at once. The answer ends one leg or the other; a leg that fails takes the other one with it."""
        reserved = await decode.reserved()
        has_first_token = asyncio.Event()
        prefill_leg = asyncio.create_task(
            self._prefill(request, attempt, placement, reserved, _announcing(emit, has_first_token))
        )
        rest_leg = asyncio.create_task(self._rest(request, decode, has_first_token, emit))
        try:
            await asyncio.wait({prefill_leg, rest_leg}, return_when=asyncio.FIRST_COMPLETED)
            if rest_leg.done():
                rest_leg.result()
            elif prefill_leg.result() is None:  # the first token did not end the answer
                await rest_leg
        finally:
            await _end(prefill_leg, rest_leg)

    async def _prefill(
        self, request: Request, attempt: Attempt, placement: Placement, reserved: pb.Reserved, emit: Emit
    ) -> FinishReason | None:
        """The prefill leg: emits the first token; returns its finish reason, or None once the KV is handed over.

        Until the first token is out, a lost prefill worker is replaced under the same reservation.
        """
        timeline = request.timeline
        first: TokenDelta | None = None
        for number in itertools.count(1):
            assert placement.prefill is not None
            request.prefill_worker = placement.prefill.worker_id
            timeline.enter(State.PREFILLING)
            try:
                async with (
                    self._admission.prefilling(placement),
                    aclosing(prefill_events(placement.prefill, attempt, number, reserved)) as events,
                ):
                    async for event in events:
                        if event.HasField("started"):
                            timeline.enter_stage(Stage.PREFILL)
                            _note_cached(request, event.started.cached_tokens)
                        elif event.HasField("first_token"):
                            first = _delta(event.first_token)
                            if first.finish_reason is None:
                                timeline.enter(State.TRANSFERRING)
                            emit(first)
                            if first.finish_reason is not None:
                                return first.finish_reason
                        else:
                            self._retries.transferred(request)
                            return None
                raise WorkerLost(f"{placement.prefill.worker_id} ended its stream before the hand-over")
            except RETRIED as error:
                if first is not None:
                    raise
                placement = self._replaced(request, placement, error)
        raise AssertionError("unreachable")

    def _replaced(self, request: Request, placement: Placement, error: ServingError) -> Placement:
        """The same reservation with another prefill worker. Raises: `error` when there is none, GivenUp."""
        try:
            replaced = self._admission.replace_prefill(request, placement)
        except WorkerLost:
            raise error from None
        try:
            self._retries.require(request, error)
        except GivenUp:
            replaced.prompt_hold.close()
            raise
        request.attempts += 1
        return replaced

    async def _rest(self, request: Request, decode: DecodeLeg, has_first_token: asyncio.Event, emit: Emit) -> None:
        """The decode leg: every token but the first, none of them before it."""
        timeline = request.timeline
        while True:
            event = await decode.next()
            await has_first_token.wait()
            if event.HasField("started"):
                timeline.enter(State.DECODING, Stage.DECODE_WAIT)
                if request.attempts == 1:  # stages add up over attempts
                    self._admission.note_handoff(timeline.stages[Stage.RESERVE] + timeline.stages[Stage.TRANSFER])
                continue
            delta = _delta(event.token)
            timeline.enter_stage(Stage.DECODE)
            emit(delta)
            if delta.finish_reason is not None:
                return


def _attempt_at(request: Request, emitted: list[int]) -> Attempt:
    return Attempt(
        request_id=request.request_id,
        transfer_id=new_transfer_id(),
        token_ids=request.prompt_token_ids + emitted,
        sampling=replace(request.sampling, max_tokens=request.sampling.max_tokens - len(emitted)),
        deadline_s=request.deadline_s,
        cache_salt=request.tenant.cache_salt,
        trace=request.caller,
    )


def _attributes(request: Request) -> Attributes:
    """What its span says of it, by OpenTelemetry's own names for generative AI where there are some."""
    return {
        "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
        "gen_ai.usage.output_tokens": request.timeline.num_output_tokens,
        "pdserve.request_id": request.request_id,
        "pdserve.state": request.timeline.state,
        "pdserve.placement": request.placement,
        "pdserve.prefill_worker": request.prefill_worker,
        "pdserve.decode_worker": request.decode_worker,
        "pdserve.cached_tokens": request.cached_tokens,
        "pdserve.attempts": request.attempts,
        "pdserve.migrations": request.migrations,
    }


def _note_cached(request: Request, num_tokens: int) -> None:
    """Hits of the attempt that gives the first token. What comes after it finds what we computed ourselves."""
    if not request.timeline.num_output_tokens:
        request.cached_tokens = num_tokens


def _delta(token: pb.SampledToken) -> TokenDelta:
    return TokenDelta(token.token_id, FinishReason(token.finish_reason) if token.finish_reason else None)


def _announcing(emit: Emit, event: asyncio.Event) -> Emit:
    def emit_and_announce(delta: TokenDelta) -> None:
        emit(delta)
        event.set()

    return emit_and_announce


async def _end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel and await every task; what they raise has already been said or no longer matters."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
