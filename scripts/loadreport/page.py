"""The report: each workload's numbers and plots, then the running streams, then the search for the highest rate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape

from loadgen.fields import COUNTS, LATENCIES, RATES, distribution_of, rate_of, statistic_names, statistics_of
from loadgen.metrics import Judgement, Summary
from loadgen.report import number_text
from loadgen.results import Results, Run, StreamsRun
from loadgen.sweep_report import sweep_sentence
from loadreport.charts import (
    attainment_against_rate,
    distribution,
    itl_over_time,
    streams_over_time,
    ttft_against_tpot,
)
from loadreport.style import STYLE
from loadreport.svg import Plot
from loadreport.timeline import timeline


def page(results: Results) -> str:
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    judged = f" Objectives: {results.judgement.slo}." if results.judgement.slo else ""
    body = [f"<h1>Load test</h1><p>{when}. Latencies count from each request's planned arrival.{escape(judged)}</p>"]
    if not results.is_complete:
        body.append("<p><strong>The test was cut short: this is what was measured before.</strong></p>")
    for name, runs in results.by_workload.items():
        body += _workload(name, runs, results.judgement)
    if results.streams:
        body += _streams(results.streams, results.judgement)
    if results.sweeps:
        body.append("<h2>The highest rate</h2>")
        body += [f"<p>{escape(sweep_sentence(swept))}</p>" for swept in results.sweeps]
        body.append(_plots([attainment_against_rate(results.sweeps)]))
    head = f'<meta charset="utf-8"><title>Load test, {when}</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(body) + "\n</body></html>\n"


def _workload(name: str, runs: Sequence[Run], judgement: Judgement) -> Iterable[str]:
    yield f"<h2>{escape(name or ' and '.join(run.target for run in runs))}</h2>"
    yield _numbers([run.target for run in runs], [run.summary(judgement) for run in runs])
    plots = [
        distribution("Time to first token: share of answers within", runs, lambda record: record.ttft_s),
        distribution("Time per output token: share of answers within", runs, lambda record: record.tpot_s),
        ttft_against_tpot(runs),
        itl_over_time(runs),
        *(timeline(run) for run in runs),
    ]
    yield _plots(plots)


def _numbers(targets: Sequence[str], summaries: Sequence[Summary]) -> str:
    rows: list[tuple[str, Sequence[float | int | None]]] = []
    for label, key, _ in LATENCIES:
        sides = [statistics_of(distribution_of(summary, key)) for summary in summaries]
        for statistic in statistic_names(summaries[0]):
            rows.append((f"{label} {statistic}, ms", [side.get(statistic) for side in sides]))
    for label, key in RATES:
        rows.append((label, [rate_of(summary, key) for summary in summaries]))
    rows += [(label, [int(getattr(summary, key)) for summary in summaries]) for label, key in COUNTS]
    if summaries[0].slo_attainment is not None:
        rows.append(("within SLO, %", [100 * (summary.slo_attainment or 0.0) for summary in summaries]))
        rows.append(("goodput, requests/s", [summary.request_goodput for summary in summaries]))
    return _table(targets, rows)


def _streams(streams: Sequence[StreamsRun], judgement: Judgement) -> Iterable[str]:
    yield "<h2>Running streams while long prompts arrive</h2>"
    rows = []
    for phase, sides in (
        ("alone", [each.idle_ms(judgement) for each in streams]),
        ("beside long prompts", [each.loaded_ms(judgement) for each in streams]),
    ):
        for statistic in dict.fromkeys(name for side in sides for name in side):
            rows.append((f"ITL {statistic} {phase}, ms", [side.get(statistic) for side in sides]))
    yield _table([each.target for each in streams], rows)
    yield _plots([streams_over_time(each) for each in streams])


def _table(columns: Sequence[str], rows: Sequence[tuple[str, Sequence[float | int | None]]]) -> str:
    head = "".join(f'<th><span class="key s{index}"></span>{escape(name)}</th>' for index, name in enumerate(columns))
    lines = [
        f"<tr><th>{escape(label)}</th>" + "".join(f"<td>{_number(value)}</td>" for value in values) + "</tr>"
        for label, values in rows
    ]
    return f"<details open><summary>Numbers</summary><table><tr><th></th>{head}</tr>{''.join(lines)}</table></details>"


def _number(value: float | int | None) -> str:
    """Counts are whole."""
    return f"{value:,}" if isinstance(value, int) else number_text(value)


def _plots(plots: Iterable[Plot]) -> str:
    return f'<div class="plots">{"".join(plot.svg() for plot in plots)}</div>'
