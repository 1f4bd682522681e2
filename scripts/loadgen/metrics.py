"""Records to numbers: the latencies, rates and failures of one run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from loadgen.record import RequestRecord

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Distribution:
    """Milliseconds. Percentiles interpolate linearly between the two nearest samples."""

    mean: float
    std: float
    p50: float
    p90: float
    p99: float

    @staticmethod
    def of_seconds(samples: Sequence[float]) -> Distribution | None:
        if not samples:
            return None
        milliseconds = np.asarray(samples) * 1000
        percentiles = (float(value) for value in np.percentile(milliseconds, PERCENTILES))
        return Distribution(float(milliseconds.mean()), float(milliseconds.std()), *percentiles)


@dataclass(frozen=True)
class Summary:
    """One run of a workload against one target. Tokens and latencies are of completed requests only."""

    duration_s: float  # first scheduled arrival → last end
    completed: int
    failed: int
    total_input_tokens: int
    total_output_tokens: int
    num_token_events: int
    num_short: int  # answers with fewer tokens than asked for
    send_lag_p99_ms: float  # scheduled → really sent: how far this generator fell behind
    ttft: Distribution | None
    tpot: Distribution | None
    itl: Distribution | None
    e2el: Distribution | None
    errors: dict[str, int]
    error_examples: dict[str, str]  # one message of each kind

    @property
    def request_throughput(self) -> float:
        return self._per_second(self.completed)

    @property
    def output_throughput(self) -> float:
        return self._per_second(self.total_output_tokens)

    @property
    def total_token_throughput(self) -> float:
        return self._per_second(self.total_input_tokens + self.total_output_tokens)

    @property
    def tokens_per_event(self) -> float:
        return self.total_output_tokens / self.num_token_events if self.num_token_events else 0.0

    def _per_second(self, amount: int) -> float:
        return amount / self.duration_s if self.duration_s > 0 else 0.0


def summarize(records: Sequence[RequestRecord]) -> Summary:
    completed = [record for record in records if record.is_completed]
    failures = [record.failure for record in records if record.failure is not None]
    ends = [record.end_s for record in records if record.end_s is not None]
    start_s = min((record.scheduled_s for record in records), default=0.0)
    lag = Distribution.of_seconds([record.sent_s - record.scheduled_s for record in records])
    return Summary(
        duration_s=max(ends, default=start_s) - start_s,
        completed=len(completed),
        failed=len(failures),
        total_input_tokens=sum(record.input_tokens for record in completed),
        total_output_tokens=sum(record.output_tokens for record in completed),
        num_token_events=sum(len(record.token_event_s) for record in completed),
        num_short=sum(record.output_tokens < record.planned_output_tokens for record in completed),
        send_lag_p99_ms=lag.p99 if lag else 0.0,
        ttft=Distribution.of_seconds(_known(record.ttft_s for record in completed)),
        tpot=Distribution.of_seconds(_known(record.tpot_s for record in completed)),
        itl=Distribution.of_seconds([gap for record in completed for gap in record.itl_s]),
        e2el=Distribution.of_seconds(_known(record.end_to_end_s for record in completed)),
        errors=dict(Counter(failure.kind for failure in failures).most_common()),
        error_examples={failure.kind: failure.detail for failure in reversed(failures)},
    )


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
