"""A circuit breaker: who fails again and again gets no work for a while, then one piece of it, then all again.

    closed ──faults──▶ open ──its pause is over──▶ half-open ──a success──▶ closed
                        ▲                              │
                        └────a fault, and twice the pause

No I/O and no timer: the clock is asked. Only what the worker itself is to blame for may be told to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum


class Circuit(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


@dataclass(frozen=True)
class BreakerLimits:
    max_faults_in_a_row: int = 3
    window: int = 20  # the latest outcomes, of which ...
    min_outcomes: int = 10  # ... once there are as many as this ...
    max_fault_share: float = 0.5  # ... this part may be faults
    first_pause_s: float = 1.0
    longest_pause_s: float = 10.0


class Breaker:
    """Outcomes count when they are told, whenever their call began: each is news of what the worker does now."""

    def __init__(self, clock: Callable[[], float], limits: BreakerLimits = BreakerLimits()) -> None:
        self._clock = clock
        self._limits = limits
        self._outcomes: deque[bool] = deque(maxlen=limits.window)  # True: a fault
        self._faults_in_a_row = 0
        self._pause_s = limits.first_pause_s
        self._open_until_s: float | None = None  # None: closed
        self._probe: object | None = None  # the one piece of work that a half-open circuit lets through

    @property
    def circuit(self) -> Circuit:
        if self._open_until_s is None:
            return Circuit.CLOSED
        return Circuit.OPEN if self._clock() < self._open_until_s else Circuit.HALF_OPEN

    @property
    def admits(self) -> bool:
        """Whether work may be given now."""
        circuit = self.circuit
        return circuit is Circuit.CLOSED or (circuit is Circuit.HALF_OPEN and self._probe is None)

    @contextmanager
    def given(self) -> Iterator[None]:
        """Around a piece of work, from the choice to its end. One that ends without an outcome (its client left, its
        deadline passed) proves nothing, and the next one is the probe."""
        me = object()
        if self._probe is None and self.circuit is Circuit.HALF_OPEN:
            self._probe = me
        try:
            yield
        finally:
            if self._probe is me:
                self._probe = None

    def succeeded(self) -> None:
        if self.circuit is Circuit.HALF_OPEN:
            self._open_until_s, self._probe = None, None
            self._pause_s = self._limits.first_pause_s
            self._outcomes.clear()
        if self.circuit is Circuit.CLOSED:
            self._outcomes.append(False)
            self._faults_in_a_row = 0

    def failed(self) -> None:
        match self.circuit:
            case Circuit.HALF_OPEN:
                self._pause_s = min(2 * self._pause_s, self._limits.longest_pause_s)
                self._open()
            case Circuit.CLOSED:
                self._outcomes.append(True)
                self._faults_in_a_row += 1
                if self._has_failed_too_often():
                    self._open()
            case Circuit.OPEN:  # what was under way when it opened
                pass

    def _has_failed_too_often(self) -> bool:
        limits, num = self._limits, len(self._outcomes)
        if self._faults_in_a_row >= limits.max_faults_in_a_row:
            return True
        return num >= limits.min_outcomes and sum(self._outcomes) >= limits.max_fault_share * num

    def _open(self) -> None:
        self._open_until_s = self._clock() + self._pause_s
        self._probe = None
        self._faults_in_a_row = 0
