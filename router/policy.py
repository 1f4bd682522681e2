"""Which workers serve a request: pure functions from snapshots to a choice.

Work is counted in tokens. What a policy sees of a worker is what it was given and has not finished, counted by this
router from selection to the end (LESSONS 21), and how much of this one prompt the worker holds already.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

PolicyName = Literal["kv_aware", "least_loaded", "round_robin"]
Policy = Callable[[Sequence["WorkerSnapshot"]], "WorkerSnapshot"]  # never called with an empty sequence

# Prompt tokens that may wait in one worker: enough to keep it busy, few enough for choices to stay fresh. Where its
# speed is known, as many as it computes in PREFILL_QUEUE_S, which is longer than a reservation or a heartbeat takes.
PREFILL_QUEUE_TOKENS = 2048
PREFILL_QUEUE_S = 0.5
# And more by this many times what the worker holds of the prompt: to wait there longer still beats computing it again
# elsewhere. This and the two weights below were chosen by scripts/bench_policies.py; docs/performance.md has the table.
REUSE_QUEUE_FACTOR = 4
# What a sequence weighs beside its tokens: the part of a step's cost that does not depend on their number.
SEQUENCE_TOKENS = 64
# What a token that waits ahead costs beside one to compute. Below 1: computing again what another worker holds is lost
# to every later request, waiting only to this one.
PREFILL_LOAD_WEIGHT = 0.5
# At 1 the cost is the load once the prompt is there: what the worker holds already takes no room a second time.
DECODE_LOAD_WEIGHT = 1.0


@dataclass(frozen=True)
class WorkerSnapshot:
    """One worker, as one request that must be placed sees it."""

    worker_id: str
    num_assigned: int  # requests sent there and not seen the end of
    assigned_tokens: int  # theirs: on a prefill worker those it has still to compute, on a decode worker all
    prompt_tokens: int = 0  # of the request to place
    cached_tokens: int = 0  # how many of them are in the worker's prefix cache, from the first on
    queue_tokens: int = PREFILL_QUEUE_TOKENS  # how many may wait there to be computed

    @property
    def load(self) -> int:
        return self.assigned_tokens + SEQUENCE_TOKENS * self.num_assigned

    @property
    def uncached_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens

    @property
    def has_room_to_prefill(self) -> bool:
        """Whether this prompt may wait there, rather than in the router for whoever is free first."""
        room = self.queue_tokens + REUSE_QUEUE_FACTOR * self.cached_tokens
        return self.num_assigned == 0 or self.assigned_tokens < room


def least_loaded(workers: Sequence[WorkerSnapshot], rng: random.Random) -> WorkerSnapshot:
    """The less loaded of two drawn at random, which keeps routers that do not know of each other from all choosing the
    same worker (Mitzenmacher, "The power of two choices in randomized load balancing", 2001)."""
    drawn = rng.sample(workers, min(2, len(workers)))
    return min(drawn, key=lambda worker: worker.load)  # drawn in random order: so is a tie's first


def kv_aware(workers: Sequence[WorkerSnapshot], rng: random.Random, *, load_weight: float) -> WorkerSnapshot:
    """The least cost: the prompt's uncached tokens there, plus `load_weight` times the load. Ties at random.

    So a worker that holds the prompt keeps it until *its own* load, beyond that of another, outweighs what it saves; no
    other worker's overload drives the prompt away. When nobody holds any of it, load alone decides (LESSONS 22).
    """
    costs = [worker.uncached_tokens + load_weight * worker.load for worker in workers]
    least = min(costs)
    return rng.choice([worker for worker, cost in zip(workers, costs, strict=True) if cost == least])


class RoundRobin:
    """Each worker in turn, by id; one that joined or left does not disturb the others' order."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, workers: Sequence[WorkerSnapshot]) -> WorkerSnapshot:
        ordered = sorted(workers, key=lambda worker: worker.worker_id)
        chosen = next((worker for worker in ordered if worker.worker_id > self._last), ordered[0])
        self._last = chosen.worker_id
        return chosen


@dataclass(frozen=True)
class Policies:
    """One for each pool. Prefill chases reuse; decode chases room, unless a worker holds the prefix already."""

    prefill: Policy
    decode: Policy


def make_policies(name: PolicyName, rng: random.Random) -> Policies:
    match name:
        case "kv_aware":
            return Policies(
                partial(kv_aware, rng=rng, load_weight=PREFILL_LOAD_WEIGHT),
                partial(kv_aware, rng=rng, load_weight=DECODE_LOAD_WEIGHT),
            )
        case "least_loaded":
            return Policies(partial(least_loaded, rng=rng), partial(least_loaded, rng=rng))
        case "round_robin":
            return Policies(RoundRobin(), RoundRobin())
