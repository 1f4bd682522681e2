"""What a check of `pdserve doctor` found, and how it is shown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text


class Grade(Enum):
    GOOD = "ok"
    ODD = "note"  # it serves; somebody may want to know
    BAD = "bad"  # it does not serve, or not as configured


STYLES = {Grade.GOOD: "green", Grade.ODD: "yellow", Grade.BAD: "bold red"}


@dataclass(frozen=True)
class Finding:
    topic: str
    grade: Grade
    text: str  # what was found and, where it is not good, what to change


def is_healthy(findings: Iterable[Finding]) -> bool:
    return all(finding.grade is not Grade.BAD for finding in findings)


def findings_table(findings: Iterable[Finding]) -> Table:
    table = Table(box=SIMPLE, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for finding in findings:
        table.add_row(Text(finding.grade.value, STYLES[finding.grade]), finding.topic, Text(finding.text))
    return table
