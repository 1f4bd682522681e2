"""A request's life: one transition table, and the timeline that every duration comes from.

    QUEUED → RESERVING → PREFILLING → TRANSFERRING → DECODING → FINISHED
       ↑__________↓___________↓____________↓____________↓          retry
    any state but the ends → CANCELLED | FAILED

A colocated request computes its prompt where it decodes: RESERVING → PREFILLING → DECODING, with no transfer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum


class State(StrEnum):
    QUEUED = "queued"
    RESERVING = "reserving"
    PREFILLING = "prefilling"
    TRANSFERRING = "transferring"
    DECODING = "decoding"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


ENDS = frozenset({State.FINISHED, State.CANCELLED, State.FAILED})

TRANSITIONS: dict[State, frozenset[State]] = {
    # finished while it is being tried again: the client's stop string was in what the lost attempt had given
    State.QUEUED: frozenset({State.RESERVING, State.FINISHED}),
    State.RESERVING: frozenset({State.PREFILLING, State.FINISHED, State.QUEUED}),
    # back to itself: another prefill worker under the same reservation
    State.PREFILLING: frozenset({State.PREFILLING, State.TRANSFERRING, State.DECODING, State.FINISHED, State.QUEUED}),
    State.TRANSFERRING: frozenset({State.DECODING, State.FINISHED, State.QUEUED}),
    State.DECODING: frozenset({State.FINISHED, State.QUEUED}),
    State.FINISHED: frozenset(),
    State.CANCELLED: frozenset(),
    State.FAILED: frozenset(),
}


class Stage(StrEnum):
    """What a request was waiting for; the stages partition its life."""

    QUEUE = "queue"  # in the router, for workers with room
    RESERVE = "reserve"  # for blocks on the decode worker
    PREFILL_QUEUE = "prefill_queue"  # in the computing worker, for its first chunk to be scheduled
    PREFILL = "prefill"  # first chunk scheduled → first token at the router
    TRANSFER = "transfer"  # first token → KV verified and the sequence scheduled on the decode worker
    DECODE_WAIT = "decode_wait"  # scheduled on the decode worker → its first token
    DECODE = "decode"


_STAGE_ON_ENTRY = {
    State.QUEUED: Stage.QUEUE,
    State.RESERVING: Stage.RESERVE,
    State.PREFILLING: Stage.PREFILL_QUEUE,
    State.TRANSFERRING: Stage.TRANSFER,
    State.DECODING: Stage.DECODE,
}


MAX_INTERVALS = 128  # that a timeline remembers one by one; a request that is tried again and again may have more


@dataclass(frozen=True)
class Interval:
    """One stay in one stage, by the timeline's clock."""

    stage: Stage
    start_s: float
    end_s: float


class IllegalTransition(AssertionError):
    """A bug in the caller: the table does not allow this step."""


@dataclass
class Timeline:
    """The state of one request and the seconds it spent in each stage. Owned by the router's pipeline."""

    clock: Callable[[], float]
    state: State = State.QUEUED
    arrival_s: float = field(init=False)
    first_token_s: float | None = None
    end_s: float | None = None
    num_output_tokens: int = 0
    stages: dict[Stage, float] = field(default_factory=dict)
    intervals: list[Interval] = field(default_factory=list)  # the same, in order; the first MAX_INTERVALS
    _last_token_s: float = field(init=False)
    _stage: Stage = Stage.QUEUE
    _stage_start_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.arrival_s = self._stage_start_s = self.clock()

    def enter(self, state: State, stage: Stage | None = None) -> None:
        """Move on; `stage` if the state does not begin with its usual one. Raises: IllegalTransition."""
        if state not in TRANSITIONS[self.state] and not (state in ENDS - {State.FINISHED} and self.state not in ENDS):
            raise IllegalTransition(f"{self.state} → {state}")
        now = self._close_stage()
        self.state = state
        if state in ENDS:
            self.end_s = now
        else:
            self._stage = stage or _STAGE_ON_ENTRY[state]

    def enter_stage(self, stage: Stage) -> None:
        """Split the current state: the prefill queue from prefill, the wait for the first decode step from decode."""
        if stage is not self._stage:
            self._close_stage()
            self._stage = stage

    def count_token(self) -> float | None:
        """The seconds since the token before; None: it is the first. Called for every token of every stream."""
        now = self.clock()
        self.num_output_tokens += 1
        if self.first_token_s is None:
            self.first_token_s = self._last_token_s = now
            return None
        gap_s = now - self._last_token_s
        self._last_token_s = now
        return gap_s

    @property
    def current(self) -> Interval:
        """The stage that it is in, so far."""
        return Interval(self._stage, self._stage_start_s, self.clock())

    @property
    def is_ended(self) -> bool:
        return self.state in ENDS

    @property
    def end_to_end_s(self) -> float:
        return (self.clock() if self.end_s is None else self.end_s) - self.arrival_s

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """(end-to-end − TTFT) / (output tokens − 1)."""
        if self.ttft_s is None or self.num_output_tokens < 2:
            return None
        return (self.end_to_end_s - self.ttft_s) / (self.num_output_tokens - 1)

    def _close_stage(self) -> float:
        now = self.clock()
        self.stages[self._stage] = self.stages.get(self._stage, 0.0) + now - self._stage_start_s
        if len(self.intervals) < MAX_INTERVALS:
            self.intervals.append(Interval(self._stage, self._stage_start_s, now))
        self._stage_start_s = now
        return now
