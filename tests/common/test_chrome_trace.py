from __future__ import annotations

from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from common.chrome_trace import TracedRequest, chrome_trace

STAGES = ["queue", "reserve", "prefill_queue", "prefill", "transfer", "decode_wait", "decode"]


def traced(name: str, start_s: float, *seconds: float, prefill: str = "prefill-0") -> TracedRequest:
    stages, now_s = [], 0.0
    for stage, length_s in zip(STAGES, seconds, strict=False):
        stages.append((stage, now_s, now_s + length_s))
        now_s += length_s
    return TracedRequest(name, start_s, stages, prefill, "decode-0", {"output_tokens": 3})


def slices(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def processes(trace: dict[str, Any]) -> dict[int, str]:
    return {event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}


def test_each_stage_is_a_slice_on_the_track_of_the_member_that_it_is_about() -> None:
    trace = chrome_trace([traced("r-1", 1000.0, 1, 2, 3, 4, 5, 6, 7)])
    of = processes(trace)
    found = [(of[each["pid"]], each["name"], each["ts"], each["dur"]) for each in slices(trace)]
    assert found == [
        ("router", "r-1", 0, 28e6),
        ("router", "queue", 0, 1e6),
        ("decode-0", "reserve", 1e6, 2e6),
        ("decode-0", "transfer", 10e6, 5e6),
        ("decode-0", "decode_wait", 15e6, 6e6),
        ("decode-0", "decode", 21e6, 7e6),
        ("prefill-0", "prefill_queue", 3e6, 3e6),
        ("prefill-0", "prefill", 6e6, 4e6),
    ]
    assert slices(trace)[0]["args"] == {"output_tokens": 3}


def test_what_the_decode_worker_computes_is_on_its_track_and_what_nobody_does_on_the_routers() -> None:
    trace = chrome_trace(
        [traced("local", 0.0, 1, 1, 1, 1, prefill=""), TracedRequest("late", 9.0, [("late", 0, 1)], "", "")]
    )
    of = processes(trace)
    tracks = {(each["name"], of[each["pid"]]) for each in slices(trace)}
    assert ("prefill", "decode-0") in tracks
    assert ("late", "router") in tracks
    assert set(of.values()) == {"router", "decode-0"}


def test_nothing_gives_an_empty_trace() -> None:
    assert slices(chrome_trace([])) == []


@given(st.lists(st.tuples(st.floats(0, 100), st.lists(st.floats(0, 5), max_size=7)), max_size=12))
def test_on_one_track_slices_follow_each_other_or_nest_and_every_event_has_the_formats_fields(
    requests: list[tuple[float, list[float]]],
) -> None:
    """The format: ts and dur in microseconds, pid and tid on each, and a name for every process and thread."""
    trace = chrome_trace([traced(f"r-{i}", start_s, *seconds) for i, (start_s, seconds) in enumerate(requests)])
    assert trace["displayTimeUnit"] == "ms"
    named = set()
    for event in trace["traceEvents"]:
        assert {"name", "ph", "pid", "tid"} <= event.keys()
        if event["ph"] == "M":
            named.add((event["name"], event["pid"], event["tid"]))
        else:
            assert event["ph"] == "X"
            assert event["ts"] >= 0
            assert event["dur"] >= 0
    for track in {(event["pid"], event["tid"]) for event in slices(trace)}:
        assert ("process_name", track[0], 0) in named
        assert ("thread_name", *track) in named
        stages = [each for each in slices(trace) if (each["pid"], each["tid"]) == track and each["cat"] == "stage"]
        in_order = sorted(stages, key=lambda each: (each["ts"], each["ts"] + each["dur"]))
        for before, after in pairwise(in_order):
            assert before["ts"] + before["dur"] <= after["ts"] + 0.01  # rounded to a nanosecond
