"""A comparison as one table: what people ask first of each workload, and what running streams felt."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from loadgen.fields import distribution_of, ratio, statistics_of
from loadgen.metrics import Judgement
from loadgen.report import ratio_text, remarks
from loadgen.results import Results, Run, StreamsRun

LATENCIES = (("TTFT", "ttft"), ("TPOT", "tpot"))


def comparison_tables(results: Results) -> RenderableType:
    """Ratios are second / first: below 1.00 the second is faster in latencies, slower in rates."""
    targets = list(dict.fromkeys(run.target for run in results.runs))
    table = Table(show_edge=False)
    table.add_column("")
    for column in _columns(targets):
        table.add_column(Text(column), justify="right")
    for name, runs in results.by_workload.items():
        table.add_row(Text(name, style="bold"))
        _add_workload(table, runs, results.judgement)
        table.add_section()
    if results.streams:
        first = results.streams[0]
        table.add_row(Text(f"ITL of {first.num_streams} running streams", style="bold"))
        _add_streams(table, results.streams, results.judgement)
    parts = [
        part
        for run in results.runs
        for part in remarks(f"{run.target}, {run.workload_name}", run.summary(results.judgement))
    ]
    return Group(table, *parts)


def _columns(targets: Sequence[str]) -> list[str]:
    return [*targets, f"{targets[1]} / {targets[0]}"] if len(targets) == 2 else list(targets)


def _add_workload(table: Table, runs: Sequence[Run], judgement: Judgement) -> None:
    summaries = [run.summary(judgement) for run in runs]
    for label, key in LATENCIES:
        sides = [statistics_of(distribution_of(summary, key)) for summary in summaries]
        for statistic in dict.fromkeys(name for side in sides for name in side if name != "mean"):
            _add_row(table, f"{label} {statistic} ms", [side.get(statistic) for side in sides])
    _add_row(table, "requests/s", [summary.request_throughput for summary in summaries], 2)
    _add_row(table, "output tokens/s", [summary.output_throughput for summary in summaries])
    if judgement.slo is not None:
        _add_row(table, "goodput, requests/s", [summary.request_goodput for summary in summaries], 2)
        _add_row(table, "within SLO, %", [100 * (summary.slo_attainment or 0.0) for summary in summaries])


def _add_streams(table: Table, streams: Sequence[StreamsRun], judgement: Judgement) -> None:
    idle = [each.idle_ms(judgement) for each in streams]
    loaded = [each.loaded_ms(judgement) for each in streams]
    for statistic in dict.fromkeys(name for side in (*idle, *loaded) for name in side if name != "mean"):
        alone = [side.get(statistic) for side in idle]
        beside = [side.get(statistic) for side in loaded]
        _add_row(table, f"{statistic} ms, alone", alone)
        _add_row(table, f"{statistic} ms, beside long prompts", beside)
        slowdowns = [ratio(first, second) for first, second in zip(alone, beside, strict=True)]
        _add_row(table, f"{statistic}, ratio to alone", slowdowns, 2)


def _add_row(table: Table, name: str, values: Sequence[float | None], num_decimals: int = 1) -> None:
    cells = ["–" if value is None else f"{value:,.{num_decimals}f}" for value in values]
    if len(values) == 2:
        cells.append(ratio_text(*values))
    table.add_row(f"  {name}", *cells)
