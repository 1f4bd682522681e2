"""The queue: requests wait here, not in the workers, until a pair of workers has room (late binding)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from common.errors import QueueFull, WorkerLost, WouldMissDeadline
from router.placement import Placement, Placer, held, held_prompt
from router.priority_lanes import Priority
from router.registry import Registry
from router.request import Request
from router.waiting_line import QueueBounds, WaitingLine

# How long a retried request waits for a worker to come back; a new request is refused at once instead.
RETURN_WAIT_S = 20.0
RETURN_POLL_S = 1.0
# What is predicted is off by some tenths. Whoever would probably miss its deadline is told so at once; whoever has
# waited is only given up when it is all but certain.
NEW_MARGIN, TURN_MARGIN = 1.15, 0.9


@dataclass(eq=False)
class _Waiting:
    """One request in the line."""

    request: Request
    placed: asyncio.Future[Placement]
    cost: int  # prompt tokens to compute, less what is cached
    must_be_in_time: bool = False  # also when its turn comes

    @property
    def tenant(self) -> str:
        return self.request.tenant.name

    @property
    def priority(self) -> Priority:
        return self.request.priority


class Admission:
    """Fair between tenants, and in order within one. Load is counted at selection and released at the end."""

    def __init__(
        self, registry: Registry, placer: Placer, bounds: QueueBounds, max_ttft_s: float | None = None
    ) -> None:
        """max_ttft_s: a request whose first token is predicted to come later is refused."""
        self._registry = registry
        self._placer = placer
        self._max_ttft_s = max_ttft_s
        self._queue: WaitingLine[_Waiting] = WaitingLine(bounds)
        self.num_placed = 0
        registry.on_change = self.dispatch

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def require_room(self, tenant: str) -> None:
        """Raises: QueueFull when whatever this tenant sends now would be refused."""
        self._queue.require_room(tenant)

    @asynccontextmanager
    async def place(self, request: Request, *, is_retry: bool) -> AsyncIterator[Placement]:
        """Wait for room, then hold it for the length of the block. A retry goes before all others, whatever the queue's
        length.

        Raises: QueueFull, also later when another tenant needs its place; WouldMissDeadline, also when its turn comes
        too late; WorkerLost when nothing that could serve is alive (for a retry: and none comes back).
        """
        cost = self._placer.uncached_tokens(request)
        waiting = _Waiting(request, asyncio.get_running_loop().create_future(), cost)
        if is_retry:  # it has had its turn, and its client may be in the middle of an answer
            self._queue.push_retry(waiting)
        else:
            self._require_ready()
            tokens_ahead = self._queue.tokens_before(waiting)
            waiting.must_be_in_time = tokens_ahead > 0 or not self._is_trial(waiting)
            if waiting.must_be_in_time:
                ttft_s = self._placer.forecast_ttft_s(request, cost, tokens_ahead)
                self._require_in_time(request, ttft_s, NEW_MARGIN, f"behind {tokens_ahead} prompt tokens in the queue")
            for pushed_out in self._queue.push(waiting):
                pushed_out.placed.set_exception(QueueFull("the queue is full, and most of it is yours; retry later"))
        try:
            self.dispatch()
            placement = await self._wait(waiting)
            self.num_placed += 1
            try:
                yield placement
            finally:
                self.num_placed -= 1
        finally:
            self._queue.discard(waiting)
            if waiting.placed.done() and waiting.placed.exception() is None:
                waiting.placed.result().prompt_hold.close()
                waiting.placed.result().decode_hold.close()
            self.dispatch()

    @asynccontextmanager
    async def prefilling(self, placement: Placement) -> AsyncIterator[None]:
        """Holds the prompt's share of a placement, which ends long before the decode worker's."""
        with placement.prompt_hold:
            yield
        self.dispatch()

    def replace_prefill(self, request: Request, placement: Placement) -> Placement:
        """The same reservation with another prefill worker, at once. Raises: WorkerLost."""
        return held_prompt(self._placer.replace_prefill(request, placement))

    def note_handoff(self, seconds: float) -> None:
        """How long a request had to wait for its reservation and for the rest of its KV."""
        self._placer.note_handoff(seconds)

    def dispatch(self) -> None:
        """Place whom we can, in order. Called whenever room may have appeared."""
        while (waiting := self._queue.peek()) is not None:
            placement = self._placer.place(waiting.request)
            if placement is None:
                return
            self._queue.pop()
            try:
                if waiting.must_be_in_time:
                    self._require_in_time(waiting.request, placement.ttft_s, TURN_MARGIN, "now that its turn has come")
            except WouldMissDeadline as error:
                waiting.placed.set_exception(error)
            else:
                waiting.placed.set_result(held(placement, waiting.request))

    async def _wait(self, waiting: _Waiting) -> Placement:
        """A queued request lasts as long as somebody could serve it; its deadline bounds the rest."""
        while True:
            done, _ = await asyncio.wait({waiting.placed}, timeout=RETURN_POLL_S)
            if done:
                return waiting.placed.result()
            if self._registry.unready_s() >= RETURN_WAIT_S:
                self._require_ready()

    def _require_ready(self) -> None:
        reason = self._registry.not_ready_reason()
        if reason is not None:
            raise WorkerLost(f"nothing can serve this request now: {reason}")

    def _is_trial(self, waiting: _Waiting) -> bool:
        """Whoever is refused is never measured, so a speed that was once too low would stay so for ever."""
        return self._placer.is_doubtful(waiting.request, waiting.cost, self._ttft_limit_s(waiting.request))

    def _require_in_time(self, request: Request, ttft_s: float | None, margin: float, cause: str) -> None:
        """margin: what is predicted is taken for as many times longer. Raises: WouldMissDeadline."""
        limit_s = self._ttft_limit_s(request)
        if ttft_s is not None and ttft_s * margin > limit_s:
            error = WouldMissDeadline(
                f"the first token would come {ttft_s:.3g} s after the request did, {cause}; "
                f"at most {limit_s:.3g} s are allowed{', less a margin for error' if margin > 1 else ''}"
            )
            error.retry_after_s = max(1.0, ttft_s - limit_s)
            raise error

    def _ttft_limit_s(self, request: Request) -> float:
        """From arrival."""
        until_deadline_s = request.deadline_s - request.timeline.arrival_s
        return until_deadline_s if self._max_ttft_s is None else min(until_deadline_s, self._max_ttft_s)
