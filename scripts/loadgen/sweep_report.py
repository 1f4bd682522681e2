"""A search for the highest rate as a table."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from loadgen.fields import statistics_of
from loadgen.metrics import Distribution, Judgement, summarize
from loadgen.report import number_text
from loadgen.results import SweepRun


def sweep_report(swept: SweepRun, judgement: Judgement) -> RenderableType:
    judged = Judgement(swept.slo, judgement.percentiles)
    table = Table(title=Text(f"{swept.target}: within {swept.slo}"), title_justify="left", title_style="bold")
    names = list(statistics_of(Distribution.of_seconds([0.0], judgement.percentiles)))
    columns = ["requests/s", "within SLO", "goodput"]
    for column in (*columns, *(f"{latency} {names[-1]} ms" for latency in ("TTFT", "TPOT"))):
        table.add_column(column, justify="right")
    for rate, records in sorted(swept.runs, key=lambda run: run[0]):
        summary = summarize(records, judged)
        worst = [number_text(statistics_of(each).get(names[-1])) for each in (summary.ttft, summary.tpot)]
        share = "–" if summary.slo_attainment is None else f"{summary.slo_attainment:.1%}"
        table.add_row(f"{rate:.2f}", share, f"{summary.request_goodput or 0.0:.2f}", *worst)
    return Group(table, Text(sweep_sentence(swept)))


def sweep_sentence(swept: SweepRun) -> str:
    sweep = swept.sweep
    goal = f"{swept.goal:.0%} of the requests within {swept.slo}"
    so_far = "" if swept.is_complete else "the search was cut short; so far "
    if sweep.highest_rate is None:
        return f"{swept.target}: {so_far}no rate that was tried keeps {goal}"
    limit = "and more" if sweep.lowest_miss is None else f"but not {sweep.lowest_miss:.2f}"
    return f"{swept.target}: {so_far}keeps {goal} at {sweep.highest_rate:.2f} requests/s, {limit}"
