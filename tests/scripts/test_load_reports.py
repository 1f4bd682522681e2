"""What load_test.py writes: JSON for programs, CSV for spreadsheets, one HTML file for people."""

from __future__ import annotations

import csv
import json
import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from loadgen.csv_report import write_csv
from loadgen.json_report import results_json
from loadgen.metrics import Judgement
from loadgen.record import Delta, RequestFailed, RequestRecord, ServerTimings
from loadgen.report import single_report
from loadgen.results import Gap, Results, Run, StreamsRun, SweepRun
from loadgen.slo import Slo
from loadgen.sweep_report import sweep_sentence
from loadgen.workload import Poisson, Workload
from loadreport.charts import attainment_against_rate, distribution, itl_over_time
from loadreport.chrome import results_trace
from loadreport.page import page
from loadreport.svg import Axis
from loadreport.timeline import stretches

SLO = Slo(ttft_s=0.3, tpot_s=0.1)
WORKLOAD = Workload(Poisson(2.0), num_requests=3)


def answered(scheduled_s: float, ttft_s: float, timings: ServerTimings | None = None) -> RequestRecord:
    record = RequestRecord(scheduled_s, scheduled_s + 0.01, 50, 3)
    for index in range(3):
        record.note(Delta(num_tokens=1, is_end=index == 2), scheduled_s + ttft_s + 0.05 * index)
    record.note(Delta(input_tokens=50, output_tokens=3, cached_tokens=32), scheduled_s + ttft_s + 0.1)
    record.timings = timings
    return record


def refused(scheduled_s: float) -> RequestRecord:
    record = RequestRecord(scheduled_s, scheduled_s, 50, 3)
    record.failure, record.end_s = RequestFailed("HTTP 429 queue_full"), scheduled_s + 0.02
    return record


@pytest.fixture
def results() -> Results:
    timings = ServerTimings({"queue": 0.02, "prefill": 0.18, "decode": 0.1}, "prefill-0", "decode-0", 1)
    results = Results(Judgement(SLO))
    for target, ttft_s in (("disaggregated", 0.2), ("<colocated> & co", 0.4)):
        for name in ("short chat", "mix"):
            records = [answered(100.5, ttft_s), answered(100.0, ttft_s, timings), refused(101.0)]
            results.runs.append(Run(name, target, WORKLOAD, records))
        idle = [Gap(0.1 * index, 0.01) for index in range(1, 11)]
        loaded = [Gap(0.1 * index, 0.03) for index in range(1, 11)]
        results.streams.append(StreamsRun(target, 4, idle, loaded, [answered(200.0, 1.0)], [0.0]))
        runs = [(1.0, [answered(0.0, 0.2)]), (2.0, [answered(0.0, 0.2), refused(1.0)])]
        results.sweeps.append(SweepRun(target, SLO, 0.9, runs, is_complete=True))
    results.is_complete = True
    return results


def test_a_comparison_is_json_by_workload_with_ratios(results: Results) -> None:
    result = json.loads(json.dumps(results_json(results)))
    assert set(result) == {"is_complete", "workloads", "running_streams", "sweeps"}
    assert set(result["workloads"]) == {"short chat", "mix"}
    chat = result["workloads"]["short chat"]
    assert [each["target"] for each in chat["targets"]] == ["disaggregated", "<colocated> & co"]
    assert chat["ratios"]["median_ttft_ms"] == pytest.approx(2.0)
    assert [each["slo_attainment"] for each in chat["targets"]] == [pytest.approx(2 / 3), 0.0]
    assert result["running_streams"][0]["ratios"]["p99_itl_ms"] == pytest.approx(3.0)
    assert [each["total_cached_tokens"] for each in chat["targets"]] == [64, 64]
    sweep = result["sweeps"][0]
    assert (sweep["highest_rate"], sweep["lowest_miss"]) == (1.0, 2.0)
    assert [(rate["request_rate"], rate["slo_attainment"]) for rate in sweep["rates"]] == [(1.0, 1.0), (2.0, 0.5)]


def test_the_csv_has_a_line_per_request_in_order_of_arrival(results: Results, tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    write_csv(results, path)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 12
    first, second, third = rows[:3]
    assert [row["scheduled_s"] for row in (first, second, third)] == ["0.0", "0.5", "1.0"]
    assert (first["ttft_ms"], first["tpot_ms"], first["is_good"]) == ("200.0", "50.0", "True")
    assert (first["prefill_ms"], first["transfer_ms"], first["prefill_worker"]) == ("180.0", "", "prefill-0")
    assert (first["input_len"], first["cached_len"]) == ("50", "32")
    assert (third["error"], third["ttft_ms"], third["is_good"]) == ("HTTP 429 queue_full", "", "False")


def test_no_requests_are_an_empty_csv(tmp_path: Path) -> None:
    write_csv(Results(Judgement()), tmp_path / "empty.csv")
    assert (tmp_path / "empty.csv").read_text().strip() == ""


def test_the_page_stands_alone_and_holds_every_plot(results: Results) -> None:
    html = page(results)
    assert not re.search(r"https?://|<script|@import|url\(|<link|<img", html)
    pictures = re.findall(r"<svg.*?</svg>", html, re.DOTALL)
    per_workload = 4 + 2  # TTFT, TPOT, one against the other, ITL; a timeline for each target
    assert len(pictures) == 2 * per_workload + 2 + 1
    for picture in pictures:
        ET.fromstring(picture)  # well-formed, whatever the targets are called
        assert "nan" not in picture
    assert "<colocated>" not in html
    assert "&lt;colocated&gt; &amp; co" in html
    assert "keeps 90% of the requests within TTFT ≤ 0.3 s, TPOT ≤ 0.1 s at 1.00 requests/s, but not 2.00" in html


def test_what_was_cut_short_says_so_everywhere(results: Results) -> None:
    assert "cut short" not in page(results)
    assert results_json(results)["is_complete"]
    results.is_complete = results.sweeps[0].is_complete = False
    assert "The test was cut short" in page(results)
    assert not results_json(results)["is_complete"]
    assert "the search was cut short; so far keeps 90%" in sweep_sentence(results.sweeps[0])


def test_prompts_that_were_cached_are_told(results: Results, capsys) -> None:
    Console(width=120).print(single_report("x", results.runs[0].summary(results.judgement)))
    told = " ".join(capsys.readouterr().out.split())
    assert "of them cached" in told
    assert "64% of the input tokens were in the server's prefix caches" in told


def test_two_tokens_at_once_do_not_flatten_the_gaps_over_time() -> None:
    record = RequestRecord(0.0, 0.0, 50, 40)
    times = [0.5 + 0.01 * index for index in range(40)]
    for at_s in [*times, times[-1] + 1e-5]:
        record.note(Delta(num_tokens=1), at_s)
    plot = itl_over_time([Run("", "x", WORKLOAD, [record])])
    assert plot.y.low > 1.0


def test_a_page_of_failures_alone_is_still_a_page() -> None:
    html = page(Results(Judgement(), [Run("", "x", WORKLOAD, [refused(1.0)]), Run("", "y", WORKLOAD, [])]))
    for picture in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
        ET.fromstring(picture)


def test_every_mark_lies_inside_the_plot(results: Results) -> None:
    plots = [
        distribution("TTFT", results.by_workload["mix"], lambda record: record.ttft_s),
        attainment_against_rate(results.sweeps),
    ]
    for plot in plots:
        for points in re.findall(r'points="([^"]+)"', plot.svg()):
            pixels = [tuple(map(float, pair.split(","))) for pair in points.split()]
            assert all(0 <= x <= 560 and 0 <= y <= 300 for x, y in pixels)


def test_the_timeline_has_the_servers_stages_where_it_tells_them() -> None:
    timings = ServerTimings({"queue": 0.02, "prefill": 0.18, "decode": 0.1}, "p", "d", 1)
    record = answered(5.0, 0.2, timings)
    assert [stretch.stage for stretch in stretches(record)] == ["late", "queue", "prefill", "decode"]
    assert sum(each.end_s - each.start_s for each in stretches(record)) == pytest.approx(0.01 + 0.3)
    assert [each.stage for each in stretches(answered(5.0, 0.2))] == ["late", "prefill", "decode"]
    assert [each.stage for each in stretches(refused(5.0))] == ["failed"]


positive = st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=20)


@given(positive)
def test_an_axis_holds_its_values_and_its_ticks_lie_on_it(values: list[float]) -> None:
    axis = Axis.over("ms", values)
    assert all(-1e-9 <= axis.share(value) <= 1 + 1e-9 for value in values)
    ticks = axis.ticks()
    assert ticks == sorted(ticks)
    assert all(-1e-6 <= axis.share(tick) <= 1 + 1e-6 for tick in ticks)
    assert 1 <= len(ticks) <= 16


def test_linear_ticks_are_round_numbers() -> None:
    assert Axis("ms", 0.0, 23.0).ticks() == [0, 5, 10, 15, 20]
    assert Axis("", 1.0, 100.0, is_log=True).ticks() == pytest.approx([1, 2, 5, 10, 20, 50, 100])
    assert math.isclose(Axis("", 1.0, 100.0, is_log=True).share(10.0), 0.5)


def test_the_trace_has_every_request_with_its_stages_on_the_tracks_of_who_served_them(results: Results) -> None:
    trace = json.loads(json.dumps(results_trace(results)))
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    members = {event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert set(members.values()) == {"router", "prefill-0", "decode-0"}
    requests = [event for event in slices if event["cat"] == "request"]
    assert len(requests) == sum(len(run.records) for run in results.runs)
    assert {event["args"]["target"] for event in requests} == {"disaggregated", "<colocated> & co"}
    computed = [event for event in slices if event["name"] == "prefill" and members[event["pid"]] == "prefill-0"]
    assert len(computed) == 4  # one request of each run knows its stages
    assert computed[0]["dur"] == pytest.approx(0.18e6)
    assert {members[event["pid"]] for event in slices if event["name"] == "failed"} == {"router"}
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in slices)
