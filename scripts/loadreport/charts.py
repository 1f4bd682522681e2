"""What each plot of the report shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median

from loadgen.record import RequestRecord
from loadgen.results import Run, StreamsRun, SweepRun
from loadreport.svg import Axis, Plot, Point

NUM_TIME_BINS = 120

Latency = Callable[[RequestRecord], float | None]


def distribution(title: str, runs: Sequence[Run], latency: Latency) -> Plot:
    """The share of answers that came within so many milliseconds: a steep line is a steady server."""
    samples = [sorted(_ms(run.records, latency)) for run in runs]
    plot = Plot(title, Axis.over("ms", [value for each in samples for value in each]), Axis("share of answers", 0, 1))
    for index, (run, values) in enumerate(zip(runs, samples, strict=True)):
        steps = [(plot.x.low, 0.0)]
        for rank, value in enumerate(values):
            steps += [(value, rank / len(values)), (value, (rank + 1) / len(values))]
        plot.line(steps, f"s{index}", run.target)
    return plot


def ttft_against_tpot(runs: Sequence[Run]) -> Plot:
    """A dot per answer. Right: it waited for its first token; up: it crept afterwards."""
    points = [
        [
            (record.ttft_s * 1000, record.tpot_s * 1000)
            for record in run.records
            if record.is_completed and record.ttft_s is not None and record.tpot_s is not None
        ]
        for run in runs
    ]
    everything = [point for each in points for point in each]
    plot = Plot(
        "TTFT against TPOT, a dot per request",
        Axis.over("TTFT, ms", [x for x, _ in everything]),
        Axis.over("TPOT, ms", [y for _, y in everything]),
    )
    for index, (run, dots) in enumerate(zip(runs, points, strict=True)):
        plot.dots(dots, f"s{index}", run.target)
    return plot


def itl_over_time(runs: Sequence[Run]) -> Plot:
    """Of all streams together: the median and the longest gap of each moment."""
    gaps = [_gaps(run.records) for run in runs]
    end_s = max((x for each in gaps for x, _ in each), default=1.0)
    curves = [[_binned(points, end_s / NUM_TIME_BINS, of) for of in (max, median)] for points in gaps]
    plot = Plot(
        "Inter-token latency over time: median, and thin the longest",
        Axis("seconds after the start", 0.0, end_s),
        Axis.over("ms", _worth_showing([y for pair in curves for curve in pair for _, y in curve]), is_log=True),
    )
    for index, (run, (longest, usual)) in enumerate(zip(runs, curves, strict=True)):
        plot.line(longest, f"s{index} thin")
        plot.line(usual, f"s{index}", run.target)
    return plot


def streams_over_time(streams: StreamsRun) -> Plot:
    """The longest gap of each quarter second, alone and while prompts (dashed) arrive."""
    idle, loaded = ([(gap.end_s, gap.seconds * 1000) for gap in gaps] for gaps in (streams.idle, streams.loaded))
    plot = Plot(
        f"{streams.target}: longest gap of {streams.num_streams} running streams",
        Axis("seconds after the phase began", 0.0, max((x for x, _ in (*idle, *loaded)), default=1.0)),
        Axis.over("ms", [y for _, y in (*idle, *loaded)], is_log=True),
    )
    for arrival_s in streams.prompt_arrivals_s:
        plot.rule(x=arrival_s, label="a long prompt arrives")
    plot.line(_binned(loaded, 0.25, max), "s0", "beside long prompts")
    plot.line(_binned(idle, 0.25, max), "s1", "alone")
    return plot


def attainment_against_rate(sweeps: Sequence[SweepRun]) -> Plot:
    rates = [point.rate for swept in sweeps for point in swept.sweep.points]
    plot = Plot(
        "SLO attainment against rate", Axis.over("requests/s", rates), Axis("share of requests within SLO", 0, 1.02)
    )
    for goal in {swept.goal for swept in sweeps}:
        plot.rule(y=goal, label=f"goal {goal:.0%}")
    for index, swept in enumerate(sweeps):
        points = sorted((point.rate, point.attainment) for point in swept.sweep.points)
        plot.line(points, f"s{index}", swept.target)
        plot.dots(points, f"s{index}")
    return plot


def _ms(records: Sequence[RequestRecord], latency: Latency) -> list[float]:
    values = (latency(record) for record in records if record.is_completed)
    return [value * 1000 for value in values if value is not None]


def _gaps(records: Sequence[RequestRecord]) -> list[Point]:
    """When each gap ended, in seconds after the first planned arrival, and how many milliseconds it took."""
    start_s = min((record.scheduled_s for record in records), default=0.0)
    return sorted(
        (later - start_s, (later - earlier) * 1000)
        for record in records
        for earlier, later in pairwise(record.token_event_s)
    )


def _worth_showing(values: Sequence[float]) -> Sequence[float]:
    """All but the smallest twentieth: two tokens that came together would push everything else to the upper edge."""
    return sorted(values)[len(values) // 20 :]


def _binned(points: Sequence[Point], width: float, of: Callable[[list[float]], float]) -> list[Point]:
    bins: dict[int, list[float]] = {}
    for x, y in points:
        bins.setdefault(int(x / width), []).append(y)
    return [((index + 0.5) * width, of(values)) for index, values in sorted(bins.items())]
