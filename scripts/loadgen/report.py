"""Summaries as tables for people."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from loadgen.fields import (
    COUNTS,
    LATENCIES,
    RATES,
    distribution_of,
    rate_of,
    ratio,
    statistic_names,
    statistics_of,
)
from loadgen.metrics import Summary

LAG_WORTH_A_NOTE_MS = 50.0
CACHED_WORTH_A_NOTE = 0.05  # of the input tokens
EVENT_SURPLUS_WORTH_A_NOTE = 0.01  # a few tokens print nothing, or print together with the next


def single_report(label: str, summary: Summary) -> RenderableType:
    """One target: a row per latency, a column per statistic, then rates and counts."""
    latencies = Table(title=label, title_justify="left", title_style="bold")
    latencies.add_column("ms")
    statistics = statistic_names(summary)
    for statistic in statistics:
        latencies.add_column(statistic, justify="right")
    for name, key, _ in LATENCIES:
        values = statistics_of(distribution_of(summary, key))
        latencies.add_row(name, *(number_text(values.get(statistic)) for statistic in statistics))
    totals = Table(show_header=False)
    totals.add_column()
    totals.add_column(justify="right")
    totals.add_row("duration s", f"{summary.duration_s:.2f}")
    for name, key in RATES:
        totals.add_row(name, number_text(rate_of(summary, key)))
    for name, key in COUNTS:
        totals.add_row(name, f"{_number(summary, key):,.0f}")
    for name, text in _objectives(summary):
        totals.add_row(name, text)
    return Group(latencies, totals, *remarks(label, summary))


def comparison_report(labels: tuple[str, str], summaries: tuple[Summary, Summary]) -> RenderableType:
    """Two targets side by side. Below 1.00 the second is faster in latencies, slower in rates."""
    table = Table()
    table.add_column("")
    for column in (f"A: {labels[0]}", f"B: {labels[1]}", "B / A"):
        table.add_column(Text(column), justify="right", overflow="fold")
    statistics = statistic_names(summaries[0])
    for name, key, _ in LATENCIES:
        sides = [statistics_of(distribution_of(summary, key)) for summary in summaries]
        for statistic in statistics:
            first, second = (side.get(statistic) for side in sides)
            is_last = statistic == statistics[-1]
            row = (number_text(first), number_text(second), ratio_text(first, second))
            table.add_row(f"{name} {statistic} ms", *row, end_section=is_last)
    for name, key in RATES:
        first, second = (rate_of(summary, key) for summary in summaries)
        row = (number_text(first), number_text(second), ratio_text(first, second))
        table.add_row(name, *row, end_section=name == RATES[-1][0])
    for name, key in COUNTS:
        table.add_row(name, *(f"{_number(summary, key):,.0f}" for summary in summaries), "")
    for (name, first_text), (_, second_text) in zip(*map(_objectives, summaries), strict=True):
        table.add_row(name, first_text, second_text, "")
    parts = [part for label, summary in zip(labels, summaries, strict=True) for part in remarks(label, summary)]
    return Group(table, *parts)


def remarks(label: str, summary: Summary) -> list[RenderableType]:
    """What failed, and what the numbers do not say by themselves."""
    return [*_errors(label, summary), *_notes(label, summary)]


def _errors(label: str, summary: Summary) -> list[RenderableType]:
    if not summary.errors:
        return []
    table = Table(title=f"errors at {label}", title_justify="left", title_style="bold red")
    table.add_column("type")
    table.add_column("count", justify="right")
    table.add_column("for example", overflow="fold")
    for kind, number in summary.errors.items():
        table.add_row(Text(kind), f"{number:,}", Text(summary.error_examples[kind]))
    return [table]


def _notes(label: str, summary: Summary) -> list[Text]:
    notes = []
    if summary.num_token_events and abs(summary.tokens_per_event - 1) > EVENT_SURPLUS_WORTH_A_NOTE:
        notes.append(
            f"{summary.total_output_tokens:,} tokens came in {summary.num_token_events:,} events"
            f" ({summary.tokens_per_event:.2f} a piece): ITL is the gap between events, not tokens"
        )
    if summary.num_short:
        notes.append(f"{summary.num_short:,} answers were shorter than asked: the server may not know ignore_eos")
    if summary.total_cached_tokens > CACHED_WORTH_A_NOTE * summary.total_input_tokens:
        notes.append(
            f"{summary.total_cached_tokens / summary.total_input_tokens:.0%} of the input tokens were in the server's"
            " prefix caches, which makes TTFT shorter: --seed N asks what it has not been asked before"
        )
    if summary.send_lag_p99_ms > LAG_WORTH_A_NOTE_MS:
        notes.append(
            f"requests left up to {summary.send_lag_p99_ms:.0f} ms (p99) after their time: this generator was the"
            " bottleneck; the latencies include the wait"
        )
    return [Text(f"note, {label}: {note}") for note in notes]


def _number(summary: Summary, key: str) -> float:
    return float(getattr(summary, key))


def _objectives(summary: Summary) -> list[tuple[str, str]]:
    if summary.slo_attainment is None or summary.request_goodput is None:
        return []
    return [("within SLO", f"{summary.slo_attainment:.1%}"), ("goodput, requests/s", f"{summary.request_goodput:,.2f}")]


def number_text(value: float | None) -> str:
    return "–" if value is None else f"{value:,.2f}"


def ratio_text(first: float | None, second: float | None) -> str:
    value = ratio(first, second)
    return "–" if value is None else f"{value:.2f}"
