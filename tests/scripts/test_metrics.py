from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.metrics import Distribution, summarize
from loadgen.record import Delta, RequestFailed, RequestRecord


def answered(scheduled_s: float, *token_s: float, sent_s: float | None = None) -> RequestRecord:
    """A request of 100 tokens in, with one token at each of these times; the last one ends it."""
    record = RequestRecord(scheduled_s, scheduled_s if sent_s is None else sent_s, 100, len(token_s))
    for now_s in token_s[:-1]:
        record.note(Delta(num_tokens=1), now_s)
    record.note(Delta(num_tokens=1, is_end=True), token_s[-1])
    record.note(Delta(input_tokens=100, output_tokens=len(token_s)), token_s[-1] + 0.5)
    return record


def failed(scheduled_s: float, end_s: float, kind: str, detail: str = "") -> RequestRecord:
    record = RequestRecord(scheduled_s, scheduled_s, 100, 10)
    record.failure, record.end_s = RequestFailed(kind, detail), end_s
    return record


def test_latencies_follow_their_definitions() -> None:
    record = answered(1.0, 1.2, 1.3, 1.6, 1.8, sent_s=1.05)
    assert record.ttft_s == pytest.approx(0.2)  # from the schedule, not from when it was sent
    assert record.end_to_end_s == pytest.approx(0.8)  # the usage event after the end does not count
    assert record.tpot_s == pytest.approx((0.8 - 0.2) / 3)
    assert record.itl_s == pytest.approx([0.1, 0.3, 0.2])


def test_an_answer_of_one_token_has_a_ttft_but_no_tpot() -> None:
    record = answered(0.0, 0.25)
    assert (record.ttft_s, record.end_to_end_s, record.tpot_s, record.itl_s) == (0.25, 0.25, None, [])


def test_an_event_of_several_tokens_is_one_gap_and_counts_every_token() -> None:
    record = RequestRecord(0.0, 0.0, 10, 5)
    record.note(Delta(num_tokens=1), 1.0)
    record.note(Delta(num_tokens=3), 2.0)
    record.note(Delta(num_tokens=1, is_end=True), 3.0)
    assert record.itl_s == [1.0, 1.0]
    assert record.output_tokens == 5
    assert record.tpot_s == pytest.approx(2.0 / 4)


def test_the_servers_own_counts_win_over_the_events() -> None:
    record = RequestRecord(0.0, 0.0, 10, 5)
    record.note(Delta(num_tokens=1, is_end=True), 1.0)
    assert (record.input_tokens, record.output_tokens) == (10, 1)
    record.note(Delta(input_tokens=12, output_tokens=5), 1.0)
    assert (record.input_tokens, record.output_tokens) == (12, 5)


def test_a_summary_of_known_records() -> None:
    records = [
        answered(0.0, 0.1, 0.2, 0.3),
        answered(1.0, 1.3, 1.5),
        failed(2.0, 2.1, "HTTP 429 queue_full", "256 wait"),
        failed(2.5, 5.0, "timeout", "30 s"),
        failed(3.0, 3.1, "HTTP 429 queue_full", "257 wait"),
    ]
    summary = summarize(records)
    assert summary.duration_s == pytest.approx(5.0)
    assert (summary.completed, summary.failed) == (2, 3)
    assert (summary.total_input_tokens, summary.total_output_tokens) == (200, 5)
    assert summary.request_throughput == pytest.approx(2 / 5)
    assert summary.output_throughput == pytest.approx(5 / 5)
    assert summary.total_token_throughput == pytest.approx(205 / 5)
    assert summary.errors == {"HTTP 429 queue_full": 2, "timeout": 1}
    assert summary.error_examples == {"HTTP 429 queue_full": "256 wait", "timeout": "30 s"}
    assert summary.ttft is not None
    assert (summary.ttft.mean, summary.ttft.median) == (pytest.approx(200), pytest.approx(200))
    assert summary.itl is not None
    assert summary.itl.mean == pytest.approx(400 / 3)
    assert summary.e2el is not None
    assert summary.e2el.percentiles[90] == pytest.approx(300 + 0.9 * 200)


def test_percentiles_of_a_hundred_known_samples() -> None:
    distribution = Distribution.of_seconds([number / 1000 for number in range(101)])
    assert distribution is not None
    assert (distribution.mean, distribution.median) == pytest.approx((50, 50))
    assert distribution.percentiles == pytest.approx({50.0: 50, 90.0: 90, 99.0: 99})
    assert distribution.std == pytest.approx((sum((n - 50) ** 2 for n in range(101)) / 101) ** 0.5)


def test_nothing_measured_is_nothing_and_not_zero() -> None:
    summary = summarize([])
    assert (summary.completed, summary.request_throughput, summary.ttft, summary.tpot) == (0, 0.0, None, None)
    only_failures = summarize([failed(0.0, 1.0, "timeout")])
    assert only_failures.ttft is None
    assert only_failures.failed == 1


def test_lateness_and_short_answers_are_counted() -> None:
    late = answered(0.0, 0.5, sent_s=0.4)
    short = answered(0.0, 0.1)
    short.planned_output_tokens = 7
    summary = summarize([late, short])
    assert summary.send_lag_p99_ms == pytest.approx(396)
    assert summary.num_short == 1


times = st.lists(st.floats(0.001, 10), min_size=1, max_size=30)


@given(st.floats(0, 100), times)
def test_ttft_and_gaps_add_up_to_the_end_to_end_time(scheduled_s: float, gaps: list[float]) -> None:
    token_s, now_s = [], scheduled_s
    for gap in gaps:
        now_s += gap
        token_s.append(now_s)
    record = answered(scheduled_s, *token_s)
    assert record.ttft_s is not None
    assert record.ttft_s + sum(record.itl_s) == pytest.approx(record.end_to_end_s)
    if record.tpot_s is not None:
        assert record.tpot_s == pytest.approx(sum(record.itl_s) / len(record.itl_s))


@given(times)
def test_percentiles_are_ordered_and_within_the_samples(samples: list[float]) -> None:
    distribution = Distribution.of_seconds(samples, (25, 50, 99.9))
    assert distribution is not None
    assert distribution.percentiles[50] == pytest.approx(distribution.median)
    ordered = [min(samples) * 1000, *distribution.percentiles.values(), max(samples) * 1000]
    assert all(low <= high + 1e-6 for low, high in pairwise(ordered))
