"""Requests as bars over time, cut into what each was waiting for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from loadgen.record import RequestRecord
from loadgen.results import Run
from loadreport.svg import BOTTOM, TOP, Axis, Plot

MAX_ROWS = 60
ROW_PX = 9.0
MIN_ROWS_PX = 60.0  # room for the name of the axis
LATE, FIRST_TOKEN, ANSWER = "late", "prefill", "decode"
NAMES = {LATE: "sent late", FIRST_TOKEN: "until the first token", ANSWER: "answer"}


@dataclass(frozen=True)
class Stretch:
    stage: str
    start_s: float
    end_s: float
    label: str


def timeline(run: Run) -> Plot:
    """By stage where the server tells them; else what a client sees: until the first token, and after it."""
    records = sorted(run.records, key=lambda record: record.scheduled_s)[:MAX_ROWS]
    start_s = min((record.scheduled_s for record in records), default=0.0)
    end_s = max((record.end_s for record in records if record.end_s is not None), default=start_s + 1.0)
    left_out = "" if len(run.records) <= MAX_ROWS else f", the first {MAX_ROWS} of {len(run.records)} requests"
    plot = Plot(
        f"{run.target}: timeline by stage{left_out}",
        Axis("seconds after the start", 0.0, end_s - start_s),
        Axis("requests", 0.0, max(len(records), 1)),
        height=TOP + BOTTOM + max(MIN_ROWS_PX, ROW_PX * len(records)),
        y_ticks=False,
    )
    for index, record in enumerate(records):
        row = len(records) - index  # the first one on top
        for stretch in stretches(record):
            tip = f"{stretch.label}: {(stretch.end_s - stretch.start_s) * 1000:.1f} ms"
            span = (stretch.start_s - start_s, stretch.end_s - start_s)
            plot.bar(span, (row - 0.9, row - 0.1), f"stage-{stretch.stage}", tip)
            if (key := (f"stage-{stretch.stage}", stretch.label)) not in plot.legend:
                plot.legend.append(key)
    return plot


def stretches(record: RequestRecord) -> Iterator[Stretch]:
    """Without gaps, from the planned arrival to the end."""
    if record.end_s is None:
        return
    if record.sent_s - record.scheduled_s > 0.001:
        yield Stretch(LATE, record.scheduled_s, record.sent_s, NAMES[LATE])
    if record.failure is not None:
        yield Stretch("failed", record.sent_s, record.end_s, "failed")
    elif record.timings is not None:
        yield from _by_stage(record, record.timings.stages)
    else:
        first_s = record.token_event_s[0]
        yield Stretch(FIRST_TOKEN, record.sent_s, first_s, NAMES[FIRST_TOKEN])
        yield Stretch(ANSWER, first_s, record.end_s, NAMES[ANSWER])


def _by_stage(record: RequestRecord, stages: dict[str, float]) -> Iterator[Stretch]:
    """The server's stages, from when the request was sent: its clock is another one, and the way there is short."""
    now_s = record.sent_s
    for stage, seconds in stages.items():
        yield Stretch(stage, now_s, now_s + seconds, stage.replace("_", " "))
        now_s += seconds
