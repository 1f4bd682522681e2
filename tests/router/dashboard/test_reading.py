from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram

from router.dashboard.reading import Distribution, Reading

INF = float("inf")


def test_a_reading_has_the_totals_and_the_series_of_each_metric() -> None:
    registry = CollectorRegistry()
    requests = Counter("requests_total", "", ["state", "error"], registry=registry)
    requests.labels("finished", "").inc(5)
    requests.labels("failed", "WorkerLost").inc(2)
    reading = Reading(registry)
    requests.labels("finished", "").inc()
    assert reading.total("requests_total") == 7  # as it was when it was read
    assert reading.total("requests_total", state="failed") == 2
    assert reading.total("absent_total") == 0
    assert list(reading.rows("requests_total")) == [
        ({"state": "finished", "error": ""}, 5),
        ({"state": "failed", "error": "WorkerLost"}, 2),
    ]
    assert reading.indexed(["requests_total"], "state") == {
        ("finished",): {"requests_total": 5},
        ("failed",): {"requests_total": 2},
    }


def test_a_histogram_is_read_as_a_distribution_and_two_readings_as_what_came_between() -> None:
    registry = CollectorRegistry()
    ttft = Histogram("ttft_seconds", "", buckets=(1.0, 2.0), registry=registry)
    ttft.observe(0.5)
    before = Reading(registry).distribution("ttft_seconds")
    ttft.observe(1.5)
    ttft.observe(3.0)
    now = Reading(registry).distribution("ttft_seconds")
    assert now == Distribution((1.0, 2.0, INF), (1, 2, 3), 5.0)
    assert now.since(before) == Distribution((1.0, 2.0, INF), (0, 1, 2), 4.5)
    assert now.count == 3


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ((0, 0, 0), 0.5, None),
        ((10, 10, 10), 0.5, 0.5),  # in the middle of [0, 1]
        ((0, 10, 10), 0.5, 1.5),
        ((5, 10, 10), 0.5, 1.0),
        ((5, 10, 10), 0.99, 1.98),
        ((0, 0, 10), 0.5, 2.0),  # beyond the last finite bound, all that is known
    ],
)
def test_quantiles_are_those_of_histogram_quantile(
    counts: tuple[float, ...], share: float, expected: float | None
) -> None:
    found = Distribution((1.0, 2.0, INF), counts, 0.0).quantile(share)
    assert found == (None if expected is None else pytest.approx(expected))
