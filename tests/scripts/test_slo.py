from __future__ import annotations

import math

import pytest

from loadgen.metrics import Judgement, summarize
from loadgen.record import Delta, RequestFailed, RequestRecord
from loadgen.slo import Slo, attainment, num_good


def answered(ttft_s: float, tpot_s: float, num_tokens: int = 3) -> RequestRecord:
    record = RequestRecord(0.0, 0.0, 10, num_tokens)
    for index in range(num_tokens):
        record.note(Delta(num_tokens=1, is_end=index == num_tokens - 1), ttft_s + index * tpot_s)
    return record


def refused() -> RequestRecord:
    record = RequestRecord(0.0, 0.0, 10, 3)
    record.failure, record.end_s = RequestFailed("HTTP 429 queue_full"), 0.01
    return record


@pytest.mark.parametrize(
    ("record", "is_met"),
    [
        (answered(0.9, 0.09), True),
        (answered(1.0, 0.125), True),  # exactly at the limits
        (answered(1.1, 0.01), False),
        (answered(0.1, 0.13), False),
        (answered(0.9, 9.0, num_tokens=1), True),  # no TPOT to miss
        (refused(), False),
    ],
)
def test_an_answer_meets_its_objectives_only_when_it_passes_none(record: RequestRecord, is_met: bool) -> None:
    assert Slo(ttft_s=1.0, tpot_s=0.125).is_met_by(record) is is_met


def test_the_end_to_end_time_can_be_limited_too() -> None:
    assert Slo(e2el_s=1.2).is_met_by(answered(1.0, 0.1))
    assert not Slo(e2el_s=1.1).is_met_by(answered(1.0, 0.1))


def test_refused_requests_count_as_missed() -> None:
    records = [answered(0.5, 0.1), answered(2.0, 0.1), refused(), refused()]
    slo = Slo(ttft_s=1.0)
    assert (num_good(records, slo), attainment(records, slo)) == (1, 0.25)


def test_a_failure_after_good_tokens_is_missed_all_the_same() -> None:
    record = answered(0.1, 0.01)
    record.failure = RequestFailed("connection broken")
    assert attainment([record], Slo()) == 0.0


def test_no_requests_have_no_share() -> None:
    with pytest.raises(ValueError, match="no request was sent"):
        attainment([], Slo())
    assert summarize([], Judgement(Slo(1.0))).slo_attainment is None


def test_goodput_counts_good_answers_per_second_of_the_whole_run() -> None:
    records = [answered(0.5, 0.1), answered(0.5, 0.1), answered(4.0, 0.5), refused()]  # the run ends at 5.0
    summary = summarize(records, Judgement(Slo(ttft_s=1.0)))
    assert summary.slo_attainment == 0.5
    assert summary.request_goodput == pytest.approx(2 / 5.0)
    assert summary.request_throughput == pytest.approx(3 / 5.0)
    assert summarize(records).request_goodput is None


def test_limits_are_read_from_text() -> None:
    assert Slo.parse("ttft:3,tpot:0.15") == Slo(3.0, 0.15, math.inf)
    assert Slo.parse("e2el:10") == Slo(e2el_s=10.0)
    assert str(Slo.parse("tpot:0.15,ttft:3")) == "TTFT ≤ 3 s, TPOT ≤ 0.15 s"


@pytest.mark.parametrize("text", ["", "ttft", "ttft:", "ttft:0", "ttft:-1", "ttft:nan", "itl:1", "ttft:1,ttft:2"])
def test_anything_else_is_no_limit(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  float's own message or ours
        Slo.parse(text)
