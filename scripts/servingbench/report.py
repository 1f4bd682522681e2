"""Figures as one table for people: a row per figure, a column per configuration, and each pair against colocated."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from servingbench.figures import Figure

BASELINE = "colocated"
MISSING = "–"
SECTIONS = {
    "time_to_ready": "start to ready",
    "ttft": "TTFT, idle system",
    "prefill_rate": "prefill",
    "tpot": "TPOT",
    "decode_step": "decode step, 1 stream",
    "exposed_handoff": "exposed handoff",
    "transfer": "handoff: transfer",
    "decode_wait": "handoff: decode wait",
    "transfer_size": "handoff: KV moved",
}


def report_table(figures: Sequence[Figure], title: str) -> Table:
    """A section per metric. Ratios below 1 say that the pair's number is the smaller one."""
    configurations = list(dict.fromkeys(figure.configuration for figure in figures))
    pairs = [name for name in configurations if name != BASELINE] if BASELINE in configurations else []
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False)
    table.add_column("", no_wrap=True)
    for name in configurations:
        table.add_column(name.replace("_", "\n", 1), justify="right", no_wrap=True)
    for name in pairs:
        table.add_column(f"{name.removeprefix('pair_')} ÷\n{BASELINE}", justify="right", no_wrap=True)
    for metric, heading in SECTIONS.items():
        _add_section(table, [figure for figure in figures if figure.metric == metric], heading, (configurations, pairs))
    return table


def _add_section(
    table: Table, figures: Sequence[Figure], heading: str, columns: tuple[Sequence[str], Sequence[str]]
) -> None:
    """Nothing at all where no configuration has such a figure."""
    configurations, pairs = columns
    choices = list(dict.fromkeys(figure.at for figure in figures))
    for at in choices:
        row = {figure.configuration: figure for figure in figures if figure.at == at}
        label = "  " + at.replace("_", " ")
        if not at:
            label = f"{heading}, {_unit(figures[0])}"
        elif at == choices[0]:
            table.add_row(f"{heading}, {_unit(figures[0])}")
        values = [_value_text(row.get(name)) for name in configurations]
        ratios = [_ratio_text(row.get(name), row.get(BASELINE)) for name in pairs]
        table.add_row(label, *values, *ratios, end_section=at == choices[-1])


def _unit(figure: Figure) -> str:
    return "MB" if figure.unit == "bytes" else figure.unit


def _value_text(figure: Figure | None) -> Text:
    if figure is None:
        return Text(MISSING)
    value = figure.value / 1e6 if figure.unit == "bytes" else figure.value
    style = "red" if figure.holds is False else ""
    return Text(f"{value:,.0f}" if figure.unit == "tokens/s" else f"{value:,.2f}", style=style)


def _ratio_text(figure: Figure | None, baseline: Figure | None) -> str:
    if figure is None or baseline is None or baseline.value == 0:
        return MISSING
    return f"{figure.value / baseline.value:.2f}"
