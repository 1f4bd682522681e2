from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from router.gap_histogram import GapHistogram

BOUNDS_S = (0.001, 0.01, 0.1, 1.0)


@given(st.lists(st.one_of(st.sampled_from([0.0, *BOUNDS_S]), st.floats(0, 10)), max_size=50))
def test_it_exports_what_the_librarys_own_histogram_would(gaps_s: list[float]) -> None:
    mine, theirs = CollectorRegistry(), CollectorRegistry()
    cheap = GapHistogram("itl_seconds", "Gaps", BOUNDS_S, mine)
    dear = Histogram("itl_seconds", "Gaps", buckets=BOUNDS_S, registry=theirs)
    for gap_s in gaps_s:
        cheap.observe(gap_s)
        dear.observe(gap_s)
    created = [line for line in generate_latest(theirs).decode().splitlines() if "itl_seconds_created" not in line]
    assert generate_latest(mine).decode().splitlines() == created
