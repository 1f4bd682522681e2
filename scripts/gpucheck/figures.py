"""One measured number, what it should be, and how it is printed and saved."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Figure:
    """holds is None where there is nothing to judge: no goal, or a check that was skipped (unit says why)."""

    name: str
    value: float | None
    unit: str
    goal: str | None = None
    holds: bool | None = None

    def __str__(self) -> str:
        if self.value is None:
            return f"  skip  {self.name}: {self.unit.removeprefix('skipped: ')}"
        verdict = {True: "ok", False: "MISS", None: ""}[self.holds]
        goal = "" if self.goal is None else f"   goal {self.goal}"
        return f"  {verdict:4}  {self.name:44} {self.value:>12.4g} {self.unit}{goal}"

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def plain(name: str, value: float, unit: str) -> Figure:
    return Figure(name, value, unit)


def at_least(name: str, value: float, unit: str, goal: float) -> Figure:
    return Figure(name, value, unit, f">= {goal:g}", value >= goal)


def at_most(name: str, value: float, unit: str, goal: float) -> Figure:
    """A NaN never holds."""
    return Figure(name, value, unit, f"<= {goal:g}", value <= goal)


def skipped(name: str, reason: str) -> Figure:
    return Figure(name, None, f"skipped: {reason}")


def failed(name: str, reason: str) -> Figure:
    """A check that raised: the reason is what its unit says."""
    return Figure(name, 0.0, reason, "runs", False)
