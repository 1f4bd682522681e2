"""Figures as tables for people: latency and rates with a column for each way in, and memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from routerbench.figures import Figure

MEMORY = "memory"
MISSING = "–"


def report_tables(figures: Sequence[Figure], title: str) -> Iterator[Table]:
    """Figures that miss their goal are red."""
    ways = [figure for figure in figures if figure.subject != MEMORY]
    memory = [figure for figure in figures if figure.subject == MEMORY]
    if ways:
        yield _by_way(ways, title)
    if memory:
        yield _memory(memory)


def _by_way(figures: Sequence[Figure], title: str) -> Table:
    subjects = list(dict.fromkeys(figure.subject for figure in figures))
    table = _table(title, "", "unit", *(subject.replace(".", "\n") for subject in subjects), "goal")
    for metric in dict.fromkeys(figure.metric for figure in figures):
        row = {figure.subject: figure for figure in figures if figure.metric == metric}
        some = next(iter(row.values()))
        values = [_number(row.get(subject)) for subject in subjects]
        table.add_row(metric.replace("_", " "), some.unit, *values, _goal(some))
    return table


def _memory(figures: Sequence[Figure]) -> Table:
    table = _table("", MEMORY, "unit", "", "goal")
    for figure in figures:
        table.add_row(figure.metric.replace("_", " "), figure.unit, _number(figure), _goal(figure))
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(*columns, title=title or None, title_justify="left", box=SIMPLE_HEAD, show_edge=False)
    for index, column in enumerate(table.columns):
        column.no_wrap = True
        column.justify = "right" if index > 1 else "left"
    return table


def _goal(figure: Figure) -> str:
    return MISSING if figure.goal is None else f"{figure.goal.sign} {figure.goal.bound:,g}"


def _number(figure: Figure | None) -> Text:
    if figure is None:
        return Text(MISSING)
    form = ",.0f" if abs(figure.value) >= 1000 else ".2f"
    return Text(format(figure.value, form), style="red" if figure.holds is False else "")
