"""Whether what failed is tried again: at most so often for one request, and at most a share of all requests.

Retries multiply load just when there is the least to carry it. Each answered request earns a fifth of a retry, so that
in the long run retries add at most a fifth; the savings let everything move that one full worker was running.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from common.errors import ServingError, TransferAborted, TransferError, WorkerDraining, WorkerUnavailable
from router.metrics import RouterMetrics
from router.request import Request

logger = logging.getLogger(__name__)

RETRIED = (WorkerUnavailable, TransferError)


@dataclass(frozen=True)
class BudgetLimits:
    share: float = 0.2  # retries for each request that was answered
    savings: float = 64.0  # most retries at once: the streams of one full worker
    per_s: float = 1.0  # earned in any case, so that a quiet router still retries


class RetryBudget:
    """A bucket of retries, full at first."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, limits: BudgetLimits = BudgetLimits()) -> None:
        self._clock = clock
        self._limits = limits
        self._saved = limits.savings
        self._saved_at_s = clock()

    def earn(self) -> None:
        self._save(self._limits.share)

    def spend(self) -> bool:
        """One retry; False if there is none left."""
        now_s = self._clock()
        self._save((now_s - self._saved_at_s) * self._limits.per_s)
        self._saved_at_s = now_s
        if self._saved < 1:
            return False
        self._saved -= 1
        return True

    def _save(self, amount: float) -> None:
        self._saved = min(self._limits.savings, self._saved + amount)


class GivenUp(Exception):
    """The end of a request: `error` is for its client, and not to be judged again."""

    def __init__(self, error: ServingError) -> None:
        super().__init__(error.message)
        self.error = error


class Retries:
    """The pipeline's judge of failures."""

    def __init__(
        self,
        budget: RetryBudget,
        metrics: RouterMetrics,
        max_attempts: int,
        on_transfer: Callable[[str, str, TransferError | None], None],
    ) -> None:
        """on_transfer: told of each KV transfer that went well or broke, with the ids of prefill and decode worker."""
        self._budget = budget
        self._metrics = metrics
        self._max_attempts = max_attempts
        self._on_transfer = on_transfer

    def answered(self) -> None:
        self._budget.earn()

    def transferred(self, request: Request) -> None:
        self._on_transfer(request.prefill_worker, request.decode_worker, None)

    def require(self, request: Request, error: ServingError) -> None:
        """Returns if the request is to be tried again.

        A worker that drains has not failed: that is neither an attempt nor a charge, and comes once from each at most.
        Raises: GivenUp with `error`, or with one of its type that says that there are too many retries.
        """
        if isinstance(error, TransferError) and not isinstance(error, TransferAborted):
            self._on_transfer(request.prefill_worker, request.decode_worker, error)
        if isinstance(error, WorkerDraining):
            request.attempts -= 1
        else:
            self._charge(request, error)
        logger.warning("%s: tried again after attempt %d: %s", request.request_id, request.attempts, error.message)
        self._metrics.retries.labels(type(error).__name__).inc()

    def _charge(self, request: Request, error: ServingError) -> None:
        if request.attempts >= self._max_attempts:
            raise GivenUp(error)
        if not self._budget.spend():
            self._metrics.refused_retries.labels(type(error).__name__).inc()
            too_many = "it is not tried again, as too many requests are being tried again now: send it again later"
            raise GivenUp(type(error)(f"{error.message}; {too_many}"))
