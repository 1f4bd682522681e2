"""Figures as tables for people: policies side by side, then the goals."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from policybench.figures import Figure

COLUMNS = {
    "ttft_mean": "TTFT s\nmean",
    "ttft_p50": "p50",
    "ttft_p99": "p99",
    "hit_rate": "prefix\nhits",
    "moved_rate": "KV\nmoved",
    "tpot_p50": "TPOT ms\np50",
    "tpot_p99": "p99",
}


def policy_table(title: str, figures: Sequence[Figure]) -> Table:
    """figures: of one trace."""
    table = _table(title, "policy", *COLUMNS.values())
    values = {figure.name.partition(".")[2]: figure for figure in figures}
    for policy in dict.fromkeys(name.partition(".")[0] for name in values):
        table.add_row(policy, *(_cell(values[f"{policy}.{column}"]) for column in COLUMNS))
    return table


def index_table(title: str, figures: Sequence[Figure]) -> Table:
    table = _table(title, "index", "", "")
    for figure in figures:
        table.add_row(figure.name.partition(".")[2], f"{figure.value:.2f}", figure.unit)
    return table


def goal_table(figures: Sequence[Figure]) -> Table:
    table = _table("", "goal", "measured", "wanted", "holds")
    for figure in figures:
        if figure.goal is not None:
            style = None if figure.holds else "red"
            table.add_row(figure.name, f"{figure.value:.3f}", figure.goal, "yes" if figure.holds else "no", style=style)
    return table


def _cell(figure: Figure) -> str:
    if figure.unit == "of prompt tokens":
        return f"{figure.value:.1%}"
    return f"{figure.value:.2f}" if figure.unit == "s" else f"{figure.value:.1f}"


def _table(title: str, *columns: str) -> Table:
    table = Table(*columns, title=title or None, title_justify="left", box=SIMPLE_HEAD, show_edge=False)
    for index, column in enumerate(table.columns):
        column.no_wrap = True
        column.justify = "right" if index else "left"
    return table
