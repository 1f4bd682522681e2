"""What was measured, with goals, and as a table: a row per figure, a column per configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

MISSING = "–"


@dataclass(frozen=True)
class Figure:
    configuration: str
    metric: str  # for people
    value: float
    unit: str
    at_least: float | None = None
    at_most: float | None = None

    @property
    def name(self) -> str:
        words = self.metric.replace("%", "percent").replace("×", "x").replace(",", "").split()
        return f"{self.configuration}." + "_".join(words).lower()

    @property
    def goal(self) -> str | None:
        if self.at_least is not None:
            return f">= {self.at_least:g}"
        return None if self.at_most is None else f"<= {self.at_most:g}"

    @property
    def holds(self) -> bool | None:
        if self.goal is None:
            return None
        return (self.at_least is None or self.value >= self.at_least) and (
            self.at_most is None or self.value <= self.at_most
        )


def as_json(figures: Sequence[Figure]) -> list[dict[str, object]]:
    return [
        {"name": each.name, "value": each.value, "unit": each.unit, "goal": each.goal, "holds": each.holds}
        for each in figures
    ]


def report_table(figures: Sequence[Figure]) -> Table:
    configurations = list(dict.fromkeys(figure.configuration for figure in figures))
    table = Table(title="who computes prompts", title_justify="left", box=SIMPLE_HEAD, show_edge=False)
    table.add_column("")
    for name in configurations:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("goal", justify="right", no_wrap=True)
    for metric in dict.fromkeys(figure.metric for figure in figures):
        row = {figure.configuration: figure for figure in figures if figure.metric == metric}
        any_figure = next(iter(row.values()))
        goals = dict.fromkeys(figure.goal for figure in row.values() if figure.goal is not None)
        label = f"{metric}, {any_figure.unit}" if any_figure.unit else metric
        table.add_row(label, *(_text(row.get(name)) for name in configurations), ", ".join(goals))
    return table


def _text(figure: Figure | None) -> Text:
    if figure is None:
        return Text(MISSING)
    return Text(f"{figure.value:,.2f}", style="red" if figure.holds is False else "")
