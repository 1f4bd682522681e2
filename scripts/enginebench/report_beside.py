"""int8 beside bfloat16 as tables for people, and as figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from enginebench.beside import Speeds
from enginebench.quality import Predictions


def speed_table(num_threads: int, speeds: Speeds) -> Table:
    table = _table(f"{num_threads} thread(s)", "", "bfloat16, ms", "int8, ms", "times faster")
    for what, by_name in speeds.items():
        none, int8 = by_name["none"], by_name["int8"]
        table.add_row(what, f"{none:.2f}", f"{int8:.2f}", f"{none / int8:.2f}")
    return table


def quality_table(quality: Mapping[str, Predictions]) -> Table:
    table = _table("quality", "weights", "perplexity", "chooses as bfloat16 does")
    for name, each in quality.items():
        table.add_row(name, f"{each.perplexity:.3f}", f"{each.agreement(quality['bfloat16']):.1%}")
    return table


def figures_beside(speeds: Mapping[int, Speeds], quality: Mapping[str, Predictions]) -> list[dict[str, Any]]:
    figures: list[dict[str, Any]] = []
    for num_threads, by_what in speeds.items():
        for what, by_name in by_what.items():
            for name, value in by_name.items():
                figures.append({"name": f"{what}.{name}.{num_threads}_threads", "value": value, "unit": "ms"})
    for name, each in quality.items():
        figures.append({"name": f"perplexity.{name}", "value": each.perplexity, "unit": ""})
        agreement = each.agreement(quality["bfloat16"])
        figures.append({"name": f"agreement.{name}", "value": agreement, "unit": "of the tokens"})
    return figures


def _table(title: str, *columns: str) -> Table:
    table = Table(*columns, title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    return table
