"""Which workers a request goes to, and when its first token will come: policies and forecasts, for live workers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from common.config import Role
from common.errors import WorkerLost
from router import disaggregation
from router.disaggregation import Disaggregation, Local, Reason, Remote, Yardsticks
from router.forecast import start_s
from router.lanes import Lanes, age_s
from router.policy import Policies, WorkerSnapshot
from router.registry import Registry
from router.request import Request
from router.worker import Worker

DOUBT_S = 2.0  # since a worker last computed a prompt: then its speed may be another
HANDOFF_MEMORY = 0.9  # what the handoffs seen so far weigh beside the next one


@dataclass(frozen=True)
class Placement:
    """Where a request goes. Without a prefill worker, `decode` computes the prompt itself."""

    prefill: Worker | None
    decode: Worker
    reason: Reason
    prompt_tokens: int  # that whoever computes the prompt is predicted to compute
    ttft_s: float | None = None  # predicted, from arrival
    prompt_hold: ExitStack = field(default_factory=ExitStack)  # the load counted on whoever computes the prompt
    decode_hold: ExitStack = field(default_factory=ExitStack)  # and on the decode worker; closing it gives it back

    @property
    def is_local(self) -> bool:
        return self.prefill is None


@dataclass(frozen=True)
class PlacementGoals:
    disaggregation: Disaggregation
    ttft_s: float
    tpot_s: float


class Placer:
    """Looks at the workers as they are now. Counts nothing on them: `held` does, once a placement is taken."""

    def __init__(self, registry: Registry, policies: Policies, goals: PlacementGoals) -> None:
        self._registry = registry
        self._policies = policies
        self._goals = goals
        self._lanes = Lanes(registry, goals.tpot_s)
        self._handoff_s = 0.0

    def note_handoff(self, seconds: float) -> None:
        """How long a request had to wait for its reservation and for the rest of its KV."""
        past_s = self._handoff_s or seconds
        self._handoff_s = HANDOFF_MEMORY * past_s + (1 - HANDOFF_MEMORY) * seconds

    def place(self, request: Request) -> Placement | None:
        """None: it must wait for room."""
        decoders = self._with_room_to_decode(request, Role.DECODE)
        remote, local = self._remote(request, decoders), self._local(request, self._able(decoders))
        reason = disaggregation.choose(
            self._goals.disaggregation,
            None if remote is None else remote.offer,
            None if local is None else local.offer,
            Yardsticks(self._goals.ttft_s, self._handoff_s, age_s(request)),
        )
        if reason == "disaggregated":
            assert remote is not None
            decoders = [decoder for decoder in decoders if self._registry.can_send(remote.worker, decoder)]
            decode = self._choose_decode(request, decoders)
            ttft_s = _from_arrival(request, remote.offer.ttft_s)
            return Placement(remote.worker, decode, reason, remote.uncached_tokens, ttft_s)
        if reason is not None:
            assert local is not None
            return _local_placement(request, local, reason)
        colocated = self._local(request, self._with_room_to_decode(request, Role.COLOCATED))
        return None if colocated is None else _local_placement(request, colocated, "colocated_worker")

    def replace_prefill(self, request: Request, placement: Placement) -> Placement:
        """The same reservation with another prefill worker, at once. Raises: WorkerLost."""
        lost = placement.prefill
        others = [worker for worker in self._senders([placement.decode]) if worker is not lost]
        if not others:
            raise WorkerLost("the prefill worker is lost and no other one is registered")
        candidates = self._snapshots(request, others)
        chosen = self._policies.prefill(list(candidates))
        return Placement(candidates[chosen], placement.decode, placement.reason, chosen.uncached_tokens)

    def uncached_tokens(self, request: Request) -> int:
        """Of its prompt, with whoever computes prompts and caches most of it; at least 1."""
        workers = self._computing()
        held = self._registry.cached_tokens(request.prompt_hashes, workers).values()
        return max(1, len(request.prompt_token_ids) - max(held, default=0))

    def forecast_ttft_s(self, request: Request, uncached_tokens: int, tokens_ahead: int) -> float | None:
        """From arrival, for a request that as many tokens wait before. None: nobody has measured yet."""
        lanes = [lane for worker in self._computing() if (lane := self._lanes.of(worker)) is not None]
        if not lanes:
            return None
        compute_s = uncached_tokens * min(lane.s_per_token for lane in lanes)
        return age_s(request) + start_s(lanes, tokens_ahead) + compute_s

    def is_doubtful(self, request: Request, uncached_tokens: int, limit_s: float) -> bool:
        """Whether what is known of some worker's speed may be out of date: it has had nothing to compute for a while,
        and at its best it would give the first token within `limit_s` of arrival."""
        return any(
            worker.prompts.idle_s >= DOUBT_S
            and worker.best_s_per_token is not None
            and age_s(request) + uncached_tokens * worker.best_s_per_token <= limit_s
            for worker in self._computing()
        )

    def _remote(self, request: Request, decoders: Sequence[Worker]) -> _RemoteCandidate | None:
        senders = self._senders(decoders)
        if not senders:
            return None
        candidates = self._snapshots(request, senders)
        with_room = [snapshot for snapshot in candidates if snapshot.has_room_to_prefill]
        chosen = self._policies.prefill(with_room or list(candidates))
        worker = candidates[chosen]
        ttft_s = self._lanes.ttft_s(worker, chosen.uncached_tokens)
        return _RemoteCandidate(
            worker, chosen.uncached_tokens, Remote(bool(with_room), ttft_s, has_queue=worker.prompts.tokens > 0)
        )

    def _local(self, request: Request, workers: Sequence[Worker]) -> _LocalCandidate | None:
        """workers: with room to decode."""
        candidates = self._snapshots(request, [worker for worker in workers if self._lanes.has_room(worker)])
        if not candidates:
            return None
        chosen = self._policies.decode(list(candidates))
        worker = candidates[chosen]
        s_per_token = self._lanes.s_per_token(worker)
        compute_s = None if s_per_token is None else chosen.uncached_tokens * s_per_token
        ttft_s = self._lanes.ttft_s(worker, chosen.uncached_tokens)
        return _LocalCandidate(worker, chosen.uncached_tokens, Local(compute_s, ttft_s))

    def _choose_decode(self, request: Request, workers: Iterable[Worker]) -> Worker:
        candidates = self._snapshots(request, workers)
        return candidates[self._policies.decode(list(candidates))]

    def _snapshots(self, request: Request, workers: Iterable[Worker]) -> dict[WorkerSnapshot, Worker]:
        cached = self._registry.cached_tokens(request.prompt_hashes, workers)
        prompt_tokens = len(request.prompt_token_ids)
        return {
            worker.snapshot(prompt_tokens, cached_tokens, self._lanes.queue_tokens(worker)): worker
            for worker, cached_tokens in cached.items()
        }

    def _senders(self, decoders: Sequence[Worker]) -> list[Worker]:
        return [
            worker
            for worker in self._registry.with_role(Role.PREFILL)
            if any(self._registry.can_send(worker, decoder) for decoder in decoders)
        ]

    def _with_room_to_decode(self, request: Request, role: Role) -> list[Worker]:
        return [worker for worker in self._registry.with_role(role) if _has_room_to_decode(worker, request)]

    def _able(self, decoders: Iterable[Worker]) -> list[Worker]:
        """To compute prompts; nobody where a setting keeps that to prefill workers."""
        return [worker for worker in decoders if self._registry.may_compute(worker)]

    def _computing(self) -> list[Worker]:
        """Who may be given a prompt to compute."""
        decoders = self._registry.with_role(Role.DECODE)
        senders = [] if self._goals.disaggregation == "never" else self._senders(decoders)
        return senders + self._able(decoders) + self._registry.with_role(Role.COLOCATED)


@dataclass(frozen=True)
class _RemoteCandidate:
    worker: Worker
    uncached_tokens: int
    offer: Remote


@dataclass(frozen=True)
class _LocalCandidate:
    worker: Worker
    uncached_tokens: int
    offer: Local


def _local_placement(request: Request, chosen: _LocalCandidate, reason: Reason) -> Placement:
    ttft_s = _from_arrival(request, chosen.offer.ttft_s)
    return Placement(None, chosen.worker, reason, chosen.uncached_tokens, ttft_s)


def _from_arrival(request: Request, from_now_s: float | None) -> float | None:
    return None if from_now_s is None else age_s(request) + from_now_s


def held(placement: Placement, request: Request) -> Placement:
    """The same, counted on its workers."""
    placement.decode_hold.enter_context(placement.decode.assigned(len(request.prompt_token_ids)))
    return held_prompt(placement)


def held_prompt(placement: Placement) -> Placement:
    """The same, counted on whoever computes its prompt."""
    if placement.prefill is not None:
        placement.prompt_hold.enter_context(placement.prefill.assigned(placement.prompt_tokens))
    computing = placement.prefill or placement.decode
    placement.prompt_hold.enter_context(computing.prompts.holding(placement.prompt_tokens))
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
