"""The circuit breaker: examples, and any history that hypothesis can think of."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.breaker import Breaker, BreakerLimits, Circuit

LIMITS = BreakerLimits(max_faults_in_a_row=3, window=20, min_outcomes=10, first_pause_s=1.0, longest_pause_s=8.0)


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def breaker(clock: FakeClock) -> Breaker:
    return Breaker(clock, LIMITS)


def opened(breaker: Breaker) -> None:
    for _ in range(LIMITS.max_faults_in_a_row):
        assert breaker.admits
        breaker.failed()
    assert not breaker.admits


def test_faults_in_a_row_open_it_and_a_success_between_them_does_not(breaker: Breaker) -> None:
    for _ in range(3):
        breaker.failed()
        breaker.failed()
        breaker.succeeded()
    assert breaker.circuit is Circuit.CLOSED
    opened(Breaker(FakeClock(), LIMITS))


def test_one_that_fails_every_other_time_is_opened_by_its_share(breaker: Breaker) -> None:
    for _ in range(LIMITS.min_outcomes // 2):
        assert breaker.circuit is Circuit.CLOSED
        breaker.succeeded()
        breaker.failed()
    assert breaker.circuit is Circuit.OPEN


def test_rare_faults_never_open_it(breaker: Breaker) -> None:
    for _ in range(200):
        breaker.failed()
        for _ in range(3):
            breaker.succeeded()
        assert breaker.admits


def test_after_its_pause_one_probe_decides(breaker: Breaker, clock: FakeClock) -> None:
    opened(breaker)
    clock.now_s += 1.0
    with breaker.given():
        assert not breaker.admits
        breaker.succeeded()
        assert breaker.circuit is Circuit.CLOSED
        assert breaker.admits


def test_each_failed_probe_doubles_the_pause_up_to_a_bound(breaker: Breaker, clock: FakeClock) -> None:
    opened(breaker)
    for pause_s in (1.0, 2.0, 4.0, 8.0, 8.0):
        clock.now_s += pause_s - 0.001
        assert not breaker.admits
        clock.now_s += 0.001
        with breaker.given():
            breaker.failed()
    clock.now_s += 8.0
    with breaker.given():
        breaker.succeeded()
    opened(breaker)
    clock.now_s += 1.0
    assert breaker.admits


def test_a_probe_whose_client_left_proves_nothing(breaker: Breaker, clock: FakeClock) -> None:
    opened(breaker)
    clock.now_s += 1.0
    with breaker.given():
        assert not breaker.admits
    assert breaker.circuit is Circuit.HALF_OPEN
    assert breaker.admits


def test_what_was_under_way_when_it_opened_neither_closes_it_nor_makes_the_pause_longer(
    breaker: Breaker, clock: FakeClock
) -> None:
    opened(breaker)
    for _ in range(50):
        breaker.failed()
        breaker.succeeded()
    assert breaker.circuit is Circuit.OPEN
    clock.now_s += 1.0
    assert breaker.admits


class AnyHistory(RuleBasedStateMachine):
    """Work is given whenever the breaker admits it, and ends in any order, well or badly or without an outcome."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.breaker = Breaker(self.clock, LIMITS)
        self.under_way: list[ExitStack] = []
        self.probes: list[ExitStack] = []  # those given while it was half-open
        self.opened_s: float | None = None

    @precondition(lambda self: self.breaker.admits)
    @rule()
    def give(self) -> None:
        work = ExitStack()
        if self.breaker.circuit is Circuit.HALF_OPEN:
            self.probes.append(work)
        work.enter_context(self.breaker.given())
        self.under_way.append(work)

    @precondition(lambda self: self.under_way)
    @rule(which=st.integers(0, 100), outcome=st.sampled_from(["success", "fault", "neither"]))
    def end(self, which: int, outcome: str) -> None:
        work = self.under_way.pop(which % len(self.under_way))
        before = self.breaker.circuit
        if outcome == "success":
            self.breaker.succeeded()
            assert self.breaker.circuit is (Circuit.OPEN if before is Circuit.OPEN else Circuit.CLOSED)
        elif outcome == "fault":
            self.breaker.failed()
            assert before is Circuit.CLOSED or self.breaker.circuit is Circuit.OPEN
        if self.breaker.circuit is not Circuit.HALF_OPEN:
            self.probes.clear()
        if work in self.probes:
            self.probes.remove(work)
        work.close()
        self._note_opening(before)

    @rule(seconds=st.floats(0, 10))
    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds

    @invariant()
    def at_most_one_probe_is_under_way(self) -> None:
        assert len(self.probes) <= 1

    @invariant()
    def an_open_circuit_admits_nothing_and_is_open_for_no_longer_than_its_longest_pause(self) -> None:
        if self.breaker.circuit is Circuit.OPEN:
            assert not self.breaker.admits
            assert self.opened_s is not None
            assert self.clock.now_s < self.opened_s + LIMITS.longest_pause_s

    @invariant()
    def nothing_shuts_a_worker_out_for_ever(self) -> None:
        assert self.breaker.admits or self.breaker.circuit is Circuit.OPEN or self.probes

    def teardown(self) -> None:
        for work in self.under_way:
            work.close()
        self.clock.now_s += LIMITS.longest_pause_s
        assert self.breaker.admits

    def _note_opening(self, before: Circuit) -> None:
        if before is not Circuit.OPEN and self.breaker.circuit is Circuit.OPEN:
            self.opened_s = self.clock.now_s


TestAnyHistory = AnyHistory.TestCase
