"""The run as tables for people: its figures, its faults in order of time, and what is to be looked into."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from chaoslab.figures import Figure, Run
from chaoslab.outcome import Ending, Outcome

EXAMPLES = 3  # of each complaint


def figure_table(figures: Sequence[Figure]) -> Table:
    table = Table("", "value", "goal", "holds", box=SIMPLE_HEAD, show_edge=False)
    _align(table)
    for figure in figures:
        name = f"  {figure.name.partition('.')[2]}" if "." in figure.name else figure.name
        holds = {None: "", True: "yes", False: "NO"}[figure.holds]
        table.add_row(name, _number(figure), figure.goal or "", holds, style="red" if figure.holds is False else None)
    return table


def timeline_table(run: Run) -> Table:
    table = Table("at", "fault", "target", "for", "served again after", box=SIMPLE_HEAD, show_edge=False)
    _align(table)
    for record in sorted(run.records, key=lambda record: record.began_s):
        fault = record.fault
        if not record.hit:
            back = "it was not running"
        elif record.served_again_s is None:
            back = "NEVER"
        else:
            back = f"{record.served_again_s - record.began_s:.1f} s"
        lasts = f"{fault.lasts_s:.1f} s" if fault.lasts_s else ""
        table.add_row(f"{record.began_s - run.start_s:.1f} s", fault.kind, fault.target, lasts, back)
    return table


def complaints(run: Run) -> list[str]:
    """What should not have happened, with names and times to find it in the logs; the same cause only a few times."""
    by_cause: dict[str, list[str]] = defaultdict(list)
    for cause, where in _complaints(run):
        by_cause[cause].append(where)
    lines = []
    for cause, places in by_cause.items():
        more = f" and {len(places) - EXAMPLES} more" if len(places) > EXAMPLES else ""
        lines.append(f"{cause} ({'; '.join(places[:EXAMPLES])}{more})")
    return lines


def _complaints(run: Run) -> Iterator[tuple[str, str]]:
    """Cause and place."""
    for each in run.sent:
        if each.mistake is not None:
            yield f"wrong: {each.mistake}", _place(run, each.outcome)
    for ending in (Ending.HUNG, Ending.UNTYPED, Ending.FAILED):
        for outcome in run.of(ending):
            causes = [f"{outcome.failure.code}: {outcome.failure.message}"] if outcome.failure else []
            causes += dict.fromkeys(each.why for each in outcome.breaks)
            yield f"{ending}: {'; '.join(causes)}", _place(run, outcome)
    for leftover in run.leftovers:
        yield f"left over: {leftover.blocks} blocks, {leftover.requests} requests", leftover.name
    for death in run.unexplained:
        yield f"crashed: {death.ending.reason} {death.ending.last_words}", death.name


def _place(run: Run, outcome: Outcome) -> str:
    end_s = "?" if outcome.end_s is None else f"{outcome.end_s - run.start_s:.1f}"
    return f"{outcome.name}, {outcome.sent_s - run.start_s:.1f} to {end_s} s"


def _number(figure: Figure) -> str:
    if figure.unit == "s":
        return f"{figure.value:.2f} s"
    return f"{figure.value:g}" if figure.value == int(figure.value) else f"{figure.value:.4f}"


def _align(table: Table) -> None:
    for index, column in enumerate(table.columns):
        column.no_wrap = True
        column.justify = "left" if index == 0 else "right"
