"""Plots as SVG text: two axes, and marks between them. Colours are CSS classes of page.py: s0, s1, … and stages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 560.0, 300.0
LEFT, RIGHT, TOP, BOTTOM = 58.0, 14.0, 30.0, 42.0  # margins, in pixels
NUM_TICKS = 6
KEY_PX, CHARACTER_PX = 25.0, 5.3  # of a legend at the font size of page.py
LOG_FROM_RATIO = 20.0  # of the largest to the smallest value: below it a linear axis shows more

Point = tuple[float, float]


@dataclass(frozen=True)
class Axis:
    """From low to high, in the unit that the label names."""

    label: str
    low: float
    high: float
    is_log: bool = False

    @staticmethod
    def over(label: str, values: Iterable[float], *, is_log: bool | None = None) -> Axis:
        """Wide enough for `values`; logarithmic where they span much, unless told otherwise."""
        positive = [value for value in values if value > 0]
        low, high = min(positive, default=1.0), max(positive, default=1.0)
        if is_log is None:
            is_log = high / low > LOG_FROM_RATIO
        return Axis(label, low / 1.15, high * 1.15, True) if is_log else Axis(label, 0.0, high * 1.05)

    def share(self, value: float) -> float:
        """0 at low, 1 at high."""
        if self.is_log:
            value = max(value, self.low)
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        if self.is_log:
            first = math.floor(math.log10(self.low))
            decades = range(first, math.ceil(math.log10(self.high)) + 1)
            steps = (1, 2, 5) if len(decades) <= 4 else (1,)
            ticks = [step * 10.0**decade for decade in decades for step in steps]
            return [tick for tick in ticks if self.low <= tick <= self.high]
        step = _nice_step((self.high - self.low) / NUM_TICKS)
        first, last = math.ceil(self.low / step), math.floor(self.high / step + 1e-9)
        return [index * step for index in range(first, last + 1)]


@dataclass
class Plot:
    title: str
    x: Axis
    y: Axis
    height: float = HEIGHT
    y_ticks: bool = True
    marks: list[str] = field(default_factory=list)
    legend: list[tuple[str, str]] = field(default_factory=list)  # class and text

    def line(self, points: Sequence[Point], style: str, label: str | None = None) -> None:
        """`style`: CSS classes."""
        path = " ".join(f"{self._px(x):.1f},{self._py(y):.1f}" for x, y in points)
        self.marks.append(f'<polyline class="line {style}" points="{path}"/>')
        self._name(style, label)

    def dots(self, points: Sequence[Point], style: str, label: str | None = None) -> None:
        for x, y in points:
            tip = f"<title>{_number(x)}, {_number(y)}</title>"
            self.marks.append(
                f'<circle class="dot {style}" cx="{self._px(x):.1f}" cy="{self._py(y):.1f}" r="3">{tip}</circle>'
            )
        self._name(style, label)

    def bar(self, x: tuple[float, float], y: tuple[float, float], style: str, tip: str) -> None:
        left, right, bottom, top = self._px(x[0]), self._px(x[1]), self._py(y[0]), self._py(y[1])
        self.marks.append(
            f'<rect class="bar {style}" x="{left:.2f}" y="{top:.2f}" width="{max(right - left, 0.3):.2f}"'
            f' height="{bottom - top:.2f}"><title>{escape(tip)}</title></rect>'
        )

    def rule(self, *, x: float | None = None, y: float | None = None, label: str | None = None) -> None:
        """A dashed line across the plot."""
        left, right = (LEFT, WIDTH - RIGHT) if x is None else (self._px(x),) * 2
        top, bottom = (TOP, self.height - BOTTOM) if y is None else (self._py(y),) * 2
        self.marks.append(f'<line class="rule" x1="{left:.1f}" x2="{right:.1f}" y1="{top:.1f}" y2="{bottom:.1f}"/>')
        self._name("rule", label)

    def svg(self) -> str:
        return "\n".join(
            [
                f'<figure><figcaption>{escape(self.title)}</figcaption><svg viewBox="0 0 {WIDTH:g} {self.height:g}"'
                f' role="img" aria-label="{escape(self.title)}">',
                *self._axes(),
                *self.marks,
                *self._legend(),
                "</svg></figure>",
            ]
        )

    def _axes(self) -> Iterable[str]:
        bottom, right = self.height - BOTTOM, WIDTH - RIGHT
        for tick in self.x.ticks():
            px = self._px(tick)
            yield f'<line class="grid" x1="{px:.1f}" x2="{px:.1f}" y1="{TOP}" y2="{bottom}"/>'
            yield f'<text class="tick middle" x="{px:.1f}" y="{bottom + 15}">{_number(tick)}</text>'
        for tick in self.y.ticks() if self.y_ticks else ():
            py = self._py(tick)
            yield f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{py:.1f}" y2="{py:.1f}"/>'
            yield f'<text class="tick end" x="{LEFT - 6}" y="{py + 4:.1f}">{_number(tick)}</text>'
        yield f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{right}"/>'
        yield f'<text class="label middle" x="{(LEFT + right) / 2}" y="{self.height - 6}">{escape(self.x.label)}</text>'
        middle = (TOP + bottom) / 2
        turned = f'transform="rotate(-90 14 {middle})"'
        yield f'<text class="label middle" x="14" y="{middle}" {turned}>{escape(self.y.label)}</text>'

    def _legend(self) -> Iterable[str]:
        widths = [KEY_PX + CHARACTER_PX * len(text) for _, text in self.legend]
        x = max(0.0, min(LEFT, WIDTH - sum(widths)))  # further left where it would not fit
        for (style, text), width in zip(self.legend, widths, strict=True):
            is_rule = style == "rule"
            key = (
                f'<line class="rule" x1="{x}" x2="{x + 12}" y1="15" y2="15"/>'
                if is_rule
                else f'<rect class="bar {style}" x="{x}" y="9" width="12" height="10"/>'
            )
            yield f'{key}<text class="tick" x="{x + 16}" y="18">{escape(text)}</text>'
            x += width

    def _name(self, style: str, label: str | None) -> None:
        if label is not None and (style, label) not in self.legend:
            self.legend.append((style, label))

    def _px(self, x: float) -> float:
        return LEFT + self.x.share(x) * (WIDTH - LEFT - RIGHT)

    def _py(self, y: float) -> float:
        return self.height - BOTTOM - self.y.share(y) * (self.height - TOP - BOTTOM)


def _nice_step(rough: float) -> float:
    """The least of 1, 2 and 5 times a power of ten that is not below `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= rough * (1 - 1e-9))


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
