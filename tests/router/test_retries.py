"""What is tried again, and who pays for it."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import CorruptPiece, ServingError, TransferAborted, TransferError, WorkerDraining, WorkerLost
from common.sampling import SamplingParams
from router.metrics import RouterMetrics
from router.request import Request
from router.retries import BudgetLimits, GivenUp, Retries, RetryBudget

POOR = BudgetLimits(share=0.2, savings=2.0, per_s=0.0)


def request(attempts: int = 1) -> Request:
    made = Request("r", [1, 2, 3], SamplingParams(max_tokens=4), time.monotonic() + 60)
    made.attempts, made.prefill_worker, made.decode_worker = attempts, "prefill-0", "decode-0"
    return made


class Scene:
    def __init__(self, limits: BudgetLimits = POOR) -> None:
        self.metrics = RouterMetrics()
        self.transfers: list[tuple[str, str, TransferError | None]] = []
        budget = RetryBudget(lambda: 0.0, limits)
        self.retries = Retries(budget, self.metrics, 3, lambda *told: self.transfers.append(told))

    def counted(self, name: str, error: type[ServingError]) -> float:
        return self.metrics.registry.get_sample_value(name, {"error": error.__name__}) or 0.0


def test_what_failed_is_tried_again_up_to_so_many_attempts() -> None:
    scene = Scene()
    error = WorkerLost("decode-0 is gone")
    scene.retries.require(request(attempts=1), error)
    scene.retries.require(request(attempts=2), error)
    with pytest.raises(GivenUp) as raised:
        scene.retries.require(request(attempts=3), error)
    assert raised.value.error is error
    assert scene.counted("request_retries_total", WorkerLost) == 2


def test_without_a_budget_the_same_error_says_what_to_do_and_is_counted() -> None:
    scene = Scene()
    for _ in range(2):
        scene.retries.require(request(), WorkerLost("gone"))
    with pytest.raises(GivenUp) as raised:
        scene.retries.require(request(), WorkerLost("gone"))
    assert type(raised.value.error) is WorkerLost
    assert raised.value.error.message.startswith("gone; ")
    assert "send it again later" in raised.value.error.message
    assert scene.counted("request_retries_refused_total", WorkerLost) == 1
    for _ in range(5):
        scene.retries.answered()
    scene.retries.require(request(), WorkerLost("gone"))


def test_a_worker_that_drains_costs_neither_an_attempt_nor_the_budget() -> None:
    scene = Scene(BudgetLimits(savings=0.0, per_s=0.0))
    moved = request(attempts=3)
    scene.retries.require(moved, WorkerDraining("decode-0 is draining"))
    assert moved.attempts == 2


def test_broken_transfers_are_told_of_the_pair_and_those_ended_on_purpose_are_not() -> None:
    scene = Scene()
    corrupt = CorruptPiece("bits")
    scene.retries.require(request(), corrupt)
    scene.retries.require(request(), TransferAborted("replaced"))
    scene.retries.transferred(request())
    assert scene.transfers == [("prefill-0", "decode-0", corrupt), ("prefill-0", "decode-0", None)]


def test_a_quiet_router_earns_retries_with_time() -> None:
    now_s = 0.0
    budget = RetryBudget(lambda: now_s, BudgetLimits(savings=1.0, per_s=0.5))
    assert budget.spend()
    assert not budget.spend()
    now_s += 1.9
    assert not budget.spend()
    now_s += 0.1
    assert budget.spend()


@given(st.lists(st.sampled_from(["answered", "failed"]), max_size=400))
def test_in_any_history_retries_are_at_most_a_share_of_the_answers_and_the_savings(history: list[str]) -> None:
    budget = RetryBudget(lambda: 0.0, POOR)
    num_answered = num_retries = 0
    for event in history:
        if event == "answered":
            budget.earn()
            num_answered += 1
        else:
            num_retries += budget.spend()
    assert num_retries <= POOR.share * num_answered + POOR.savings + 1e-6
