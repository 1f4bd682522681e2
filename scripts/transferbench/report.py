"""Figures as tables for people: the transports by size, the handoff by load, and every goal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from transferbench.figures import Figure
from transferbench.goals import YARDSTICKS

HANDOFF = "handoff"
MISSING = "–"


def report_tables(figures: Sequence[Figure], title: str) -> Iterator[Table]:
    """Figures that miss their goal are red."""
    unmeasured = [figure for figure in figures if figure.value is None]
    measured = [figure for figure in figures if figure.value is not None]
    transfers = [figure for figure in measured if figure.subject != HANDOFF]
    handoffs = [figure for figure in measured if figure.subject == HANDOFF]
    if transfers:
        yield _transports(transfers, title)
    if handoffs:
        yield _handoffs([figure for figure in handoffs if figure.metric != "sending_cost"])
        yield _sending([figure for figure in handoffs if figure.metric == "sending_cost"])
    if unmeasured:
        yield _unmeasured(unmeasured)


def _transports(figures: Sequence[Figure], title: str) -> Table:
    columns = ("", "pieces", "GB/s", "limit\nGB/s", "of\nlimit", "goal", "beside\nGB/s", "CPU\ns/GB", "limit\ns/GB")
    table = _table(title, *columns, "hash")
    transports = list(dict.fromkeys(figure.subject for figure in figures))
    table.caption, table.caption_justify = "\n".join(map(_yardstick_text, transports)), "left"
    for transport in transports:
        own = [figure for figure in figures if figure.subject == transport]
        table.add_row(transport)
        sizes = list(dict.fromkeys(figure.at for figure in own))
        for at in sizes:
            row = {figure.metric: figure for figure in own if figure.at == at}
            goal = row["share"].goal
            table.add_row(
                f"  {at.removesuffix('_mb')} MB",
                _number(row.get("pieces"), ",.0f"),
                _number(row.get("rate"), ".2f"),
                _number(row.get("limit"), ".2f"),
                _number(row.get("share"), ".0%"),
                MISSING if goal is None else f"{goal.bound:.0%}",
                _number(row.get("beside"), ".2f"),
                _number(row.get("cpu"), ".2f"),
                _number(row.get("cpu_limit"), ".2f"),
                _number(row.get("checksum_share"), ".1%"),
                end_section=at == sizes[-1],
            )
    return table


def _yardstick_text(transport: str) -> str:
    yardstick = YARDSTICKS[transport]
    beside = "" if yardstick.beside is None else f", beside: {yardstick.beside}"
    return f"{transport}: limit: {yardstick.limit}{beside}"


def _handoffs(figures: Sequence[Figure]) -> Table:
    table = _table("", "handoff", "in\nflight", "prefill\nms", "exposed\nms", "goal", "of the\nprefill", "goal")
    for at in dict.fromkeys(figure.at for figure in figures):
        row = {figure.metric: figure for figure in figures if figure.at == at}
        num_tokens, in_flight = at.removesuffix("_in_flight").split("_tokens_")
        exposed, share = row["exposed"], row["exposed_share"]
        table.add_row(
            f"{int(num_tokens):,} tokens",
            in_flight,
            _number(row["prefill"], ",.1f"),
            _number(exposed, ",.1f"),
            MISSING if exposed.goal is None else str(exposed.goal),
            _number(share, ".1%"),
            MISSING if share.goal is None else f"{share.goal.sign} {share.goal.bound:.0%}",
        )
    return table


def _sending(figures: Sequence[Figure]) -> Table:
    table = _table("", "sending slows the prefill by", "", "goal")
    for figure in figures:
        goal = MISSING if figure.goal is None else f"{figure.goal.sign} {figure.goal.bound:.0%}"
        table.add_row(f"{int(figure.at.removesuffix('_tokens')):,} tokens", _number(figure, ".1%"), goal)
    return table


def _unmeasured(figures: Sequence[Figure]) -> Table:
    """The reasons may be long: they wrap."""
    table = Table("not measured", "", box=SIMPLE_HEAD, show_edge=False)
    table.columns[0].no_wrap = True
    for figure in figures:
        table.add_row(figure.subject, Text(figure.unit))
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(*columns, title=title or None, title_justify="left", box=SIMPLE_HEAD, show_edge=False)
    for index, column in enumerate(table.columns):
        column.no_wrap = True
        column.justify = "right" if index else "left"
    return table


def _number(figure: Figure | None, form: str) -> Text:
    if figure is None or figure.value is None:
        return Text(MISSING)
    return Text(format(figure.value, form), style="red" if figure.holds is False else "")
