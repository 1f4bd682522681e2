"""Which workers serve a request: pure functions from snapshots to a choice."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Policy = Callable[[Sequence["WorkerSnapshot"]], "WorkerSnapshot"]  # never called with an empty sequence


@dataclass(frozen=True)
class WorkerSnapshot:
    """One worker's load as this router counts it: from selection to the end of the stream (LESSONS 21)."""

    worker_id: str
    num_assigned: int  # requests sent there and not seen the end of
    assigned_tokens: int  # their prompt tokens


def least_loaded(workers: Sequence[WorkerSnapshot]) -> WorkerSnapshot:
    """Fewest assigned prompt tokens, then fewest requests; ties at random."""
    least = min((worker.assigned_tokens, worker.num_assigned) for worker in workers)
    return random.choice([w for w in workers if (w.assigned_tokens, w.num_assigned) == least])


class RoundRobin:
    """Each worker in turn, by id; one that joined or left does not disturb the others' order."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, workers: Sequence[WorkerSnapshot]) -> WorkerSnapshot:
        ordered = sorted(workers, key=lambda worker: worker.worker_id)
        chosen = next((worker for worker in ordered if worker.worker_id > self._last), ordered[0])
        self._last = chosen.worker_id
        return chosen


def make_policy(name: Literal["least_loaded", "round_robin"]) -> Policy:
    """A policy of its own for each pool: round robin remembers its turn."""
    return RoundRobin() if name == "round_robin" else least_loaded
