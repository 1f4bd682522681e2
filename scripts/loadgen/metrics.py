"""Records to numbers: the latencies, rates and failures of one run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from loadgen.record import RequestRecord
from loadgen.slo import Slo, attainment, num_good

PERCENTILES = (50.0, 90.0, 99.0)


@dataclass(frozen=True)
class Distribution:
    """Milliseconds. Percentiles interpolate linearly between the two nearest samples."""

    mean: float
    std: float
    median: float
    percentiles: dict[float, float]  # by what was asked for, such as 99 or 99.9

    @staticmethod
    def of_seconds(samples: Sequence[float], percentiles: Sequence[float] = PERCENTILES) -> Distribution | None:
        if not samples:
            return None
        milliseconds = np.asarray(samples) * 1000
        values = (float(value) for value in np.percentile(milliseconds, percentiles))
        return Distribution(
            mean=float(milliseconds.mean()),
            std=float(milliseconds.std()),
            median=float(np.median(milliseconds)),
            percentiles=dict(zip(percentiles, values, strict=True)),
        )


@dataclass(frozen=True)
class Summary:
    """One run of a workload against one target. Tokens and latencies are of completed requests only."""

    duration_s: float  # first scheduled arrival → last end
    completed: int
    failed: int
    total_input_tokens: int
    total_cached_tokens: int  # of the input, as far as the server tells
    total_output_tokens: int
    num_token_events: int
    num_short: int  # answers with fewer tokens than asked for
    send_lag_p99_ms: float  # scheduled → really sent: how far this generator fell behind
    percentiles: tuple[float, ...]  # that every distribution has
    ttft: Distribution | None
    tpot: Distribution | None
    itl: Distribution | None
    e2el: Distribution | None
    errors: dict[str, int]
    error_examples: dict[str, str]  # one message of each kind
    slo_attainment: float | None  # share of all requests that met their objectives; None: there were none
    num_good: int | None

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
    def request_goodput(self) -> float | None:
        return None if self.num_good is None else self._per_second(self.num_good)

    @property
    def tokens_per_event(self) -> float:
        return self.total_output_tokens / self.num_token_events if self.num_token_events else 0.0

    def _per_second(self, amount: int) -> float:
        return amount / self.duration_s if self.duration_s > 0 else 0.0


@dataclass(frozen=True)
class Judgement:
    """What a summary tells besides the obvious."""

    slo: Slo | None = None
    percentiles: tuple[float, ...] = PERCENTILES


def summarize(records: Sequence[RequestRecord], judgement: Judgement = Judgement()) -> Summary:
    slo = judgement.slo if records else None
    completed = [record for record in records if record.is_completed]
    failures = [record.failure for record in records if record.failure is not None]
    ends = [record.end_s for record in records if record.end_s is not None]
    start_s = min((record.scheduled_s for record in records), default=0.0)
    lag_s = [record.sent_s - record.scheduled_s for record in records]

    def distribution(samples: Iterable[float | None]) -> Distribution | None:
        return Distribution.of_seconds([sample for sample in samples if sample is not None], judgement.percentiles)

    return Summary(
        duration_s=max(ends, default=start_s) - start_s,
        completed=len(completed),
        failed=len(failures),
        total_input_tokens=sum(record.input_tokens for record in completed),
        total_cached_tokens=sum(record.cached_tokens for record in completed),
        total_output_tokens=sum(record.output_tokens for record in completed),
        num_token_events=sum(len(record.token_event_s) for record in completed),
        num_short=sum(record.output_tokens < record.planned_output_tokens for record in completed),
        send_lag_p99_ms=float(np.percentile(lag_s, 99)) * 1000 if lag_s else 0.0,
        percentiles=judgement.percentiles,
        ttft=distribution(record.ttft_s for record in completed),
        tpot=distribution(record.tpot_s for record in completed),
        itl=distribution(gap for record in completed for gap in record.itl_s),
        e2el=distribution(record.end_to_end_s for record in completed),
        errors=dict(Counter(failure.kind for failure in failures).most_common()),
        error_examples={failure.kind: failure.detail for failure in reversed(failures)},
        slo_attainment=None if slo is None else attainment(records, slo),
        num_good=None if slo is None else num_good(records, slo),
    )
