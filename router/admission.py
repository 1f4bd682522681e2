"""The queue: requests wait here, not in the workers, until a pair of workers has room (late binding)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field

from common.config import Role
from common.errors import QueueFull, WorkerLost
from router.policy import Policies, WorkerSnapshot
from router.priority_lanes import Priority
from router.registry import Registry
from router.request import Request
from router.waiting_line import QueueBounds, WaitingLine
from router.worker import Worker

# How long a retried request waits for a worker to come back; a new request is refused at once instead.
RETURN_WAIT_S = 20.0


@dataclass(frozen=True)
class Placement:
    """Where a request goes. Without a prefill worker, `decode` computes the prompt itself."""

    prefill: Worker | None
    decode: Worker
    prefill_tokens: int = 0  # that `prefill` is predicted to compute
    prefill_hold: ExitStack = field(default_factory=ExitStack)  # the load counted on each; closing it gives it back
    decode_hold: ExitStack = field(default_factory=ExitStack)


@dataclass(eq=False)
class _Waiting:
    """One request in the line."""

    request: Request
    placed: asyncio.Future[Placement]
    cost: int  # prompt tokens to compute

    @property
    def tenant(self) -> str:
        return self.request.tenant.name

    @property
    def priority(self) -> Priority:
        return self.request.priority


class Admission:
    """Fair between tenants, and in order within one. Load is counted at selection and released at the end."""

    def __init__(self, registry: Registry, policies: Policies, bounds: QueueBounds) -> None:
        self._registry = registry
        self._policies = policies
        self._queue: WaitingLine[_Waiting] = WaitingLine(bounds)
        self.num_placed = 0
        registry.on_change = self.dispatch

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @asynccontextmanager
    async def place(self, request: Request, *, is_retry: bool) -> AsyncIterator[Placement]:
        """Wait for room, then hold it for the length of the block. A retry goes before all others, whatever the queue's
        length.

        Raises: QueueFull, also later when another tenant needs its place; WorkerLost when nothing that could serve is
        alive (for a retry: and none comes back).
        """
        waiting = _Waiting(request, asyncio.get_running_loop().create_future(), len(request.prompt_token_ids))
        if is_retry:  # it has had its turn, and its client may be in the middle of an answer
            self._queue.push_retry(waiting)
        else:
            self._require_ready()
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
                waiting.placed.result().prefill_hold.close()
                waiting.placed.result().decode_hold.close()
            self.dispatch()

    @asynccontextmanager
    async def prefilling(self, placement: Placement) -> AsyncIterator[None]:
        """Holds the prefill worker's share of a placement, which ends long before the decode worker's."""
        with placement.prefill_hold:
            yield
        self.dispatch()

    def replace_prefill(self, request: Request, placement: Placement) -> Placement:
        """The same reservation with another prefill worker, at once. Raises: WorkerLost."""
        lost = placement.prefill
        others = [
            worker
            for worker in self._registry.with_role(Role.PREFILL)
            if worker is not lost and self._registry.can_send(worker, placement.decode)
        ]
        if not others:
            raise WorkerLost("the prefill worker is lost and no other one is registered")
        prefill, tokens = self._choose_prefill(self._snapshots(request, others))
        return _holding_prefill(Placement(prefill, placement.decode, tokens))

    def dispatch(self) -> None:
        """Place whom we can, in order. Called whenever room may have appeared."""
        while (waiting := self._queue.peek()) is not None:
            placement = self._choose_pair(waiting.request)
            if placement is None:
                return
            self._queue.pop()
            placement.decode_hold.enter_context(placement.decode.assigned(len(waiting.request.prompt_token_ids)))
            waiting.placed.set_result(_holding_prefill(placement))

    async def _wait(self, waiting: _Waiting) -> Placement:
        """A queued request lasts as long as somebody could serve it; its deadline bounds the rest."""
        while True:
            done, _ = await asyncio.wait({waiting.placed}, timeout=RETURN_WAIT_S)
            if done:
                return waiting.placed.result()
            self._require_ready()

    def _require_ready(self) -> None:
        reason = self._registry.not_ready_reason()
        if reason is not None:
            raise WorkerLost(f"nothing can serve this request now: {reason}")

    def _choose_pair(self, request: Request) -> Placement | None:
        decoders = self._with_room_to_decode(request, Role.DECODE)
        prefillers = [
            worker
            for worker in self._registry.with_role(Role.PREFILL)
            if any(self._registry.can_send(worker, decoder) for decoder in decoders)
        ]
        with_room = {
            snapshot: worker
            for snapshot, worker in self._snapshots(request, prefillers).items()
            if snapshot.has_room_to_prefill
        }
        if with_room:
            prefill, tokens = self._choose_prefill(with_room)
            decoders = [decoder for decoder in decoders if self._registry.can_send(prefill, decoder)]
            return Placement(prefill, self._choose_decode(request, decoders), tokens)
        colocated = self._with_room_to_decode(request, Role.COLOCATED)
        return Placement(None, self._choose_decode(request, colocated)) if colocated else None

    def _choose_prefill(self, candidates: dict[WorkerSnapshot, Worker]) -> tuple[Worker, int]:
        """Who, and how many tokens of the prompt it will have to compute."""
        chosen = self._policies.prefill(list(candidates))
        return candidates[chosen], chosen.uncached_tokens

    def _choose_decode(self, request: Request, workers: Iterable[Worker]) -> Worker:
        candidates = self._snapshots(request, workers)
        return candidates[self._policies.decode(list(candidates))]

    def _snapshots(self, request: Request, workers: Iterable[Worker]) -> dict[WorkerSnapshot, Worker]:
        cached = self._registry.cached_tokens(request.prompt_hashes, workers)
        prompt_tokens = len(request.prompt_token_ids)
        return {worker.snapshot(prompt_tokens, cached_tokens): worker for worker, cached_tokens in cached.items()}

    def _with_room_to_decode(self, request: Request, role: Role) -> list[Worker]:
        return [worker for worker in self._registry.with_role(role) if _has_room_to_decode(worker, request)]


def _holding_prefill(placement: Placement) -> Placement:
    if placement.prefill is not None:
        placement.prefill_hold.enter_context(placement.prefill.assigned(placement.prefill_tokens))
    return placement


def _has_room_to_decode(worker: Worker, request: Request) -> bool:
    """Room for one more sequence, and for its prompt's blocks as of the last heartbeat and as we count ourselves."""
    if worker.num_assigned >= worker.hello.max_num_seqs:
        return False
    if not worker.load.total_blocks or worker.num_assigned == 0:
        return True
    block_size = worker.hello.kv_capacity_tokens // worker.load.total_blocks
    needed = math.ceil((len(request.prompt_token_ids) + 1) / block_size)
    reported = worker.load.free_blocks
    counted = worker.load.total_blocks - math.ceil(worker.assigned_tokens / block_size) - worker.num_assigned
    return needed <= min(reported, counted)
