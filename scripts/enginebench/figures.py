"""From the passes with one number of threads to figures: medians, each with a name that stays the same.

| key | what it is |
|---|---|
| limit.read, limit.multiply | the best of all probes |
| prefill_N.rate | N prompt tokens / time from queued to first token, the prompt in one step |
| prefill_in_chunks_N.rate, .multiply_share | the same with the CPU's default token budget of a step, as workers run |
| decode_BxC.tpot, .rate | one step of B sequences with C tokens of context each; tokens of all B per second |
| *.bytes, *.operations | what must be read from memory and multiplied, see work.py |
| *.read_share, *.multiply_share | those / the measured time / the limit |
| decode_BxC.python_share, .python_time | of a step, outside kernels, see clock.py |
| decode_8.context_cost | how much longer a step takes with the long context / the time to read the extra KV |
| sampling_KIND_B.row_time, .step_share | of B rows of logits, by row; all of them / a decode step of B, short context |
| transformers.* | Hugging Face transformers; times_faster: how much faster the engine is |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench_goal import Goal
from engine.model.config import ModelConfig
from enginebench.goals import goals_for
from enginebench.measure import (
    COMPARED_LENGTH,
    DECODE_POINTS,
    LONG,
    PREFILL_LENGTHS,
    SAMPLING_POINTS,
    SHORT,
    DecodePoint,
    Pass,
)
from enginebench.work import NumberBytes, Work, step_work
from kernelbench.measure import Limits

GROWTH_BATCH = 8


@dataclass(frozen=True)
class Figure:
    key: str
    num_threads: int
    value: float
    unit: str
    goal: Goal | None = None

    @property
    def name(self) -> str:
        return f"{self.key}.{self.num_threads}_threads"

    @property
    def holds(self) -> bool | None:
        return None if self.goal is None else self.goal.holds(self.value)


@dataclass(frozen=True)
class Run:
    """All that was measured with one number of threads."""

    model: ModelConfig
    number_bytes: NumberBytes
    num_threads: int
    limits: Limits
    passes: Sequence[Pass]
    has_goals: bool  # they are meant for one model in one dtype


def figures_of(run: Run) -> list[Figure]:
    goals = goals_for(run.num_threads) if run.has_goals else {}
    medians = (
        *_limits(run.limits),
        *_prefill(run),
        *_decode(run),
        *_context_cost(run),
        *_sampling(run),
        *_transformers(run),
    )
    return [Figure(key, run.num_threads, value, unit, goals.get(key)) for key, value, unit in medians]


def figures_json(figures: Iterable[Figure]) -> list[dict[str, Any]]:
    return [
        {
            "name": figure.name,
            "value": figure.value,
            "unit": figure.unit,
            "goal": None if figure.goal is None else str(figure.goal),
            "holds": figure.holds,
        }
        for figure in figures
    ]


Median = tuple[str, float, str]  # key, value, unit


def _limits(limits: Limits) -> Iterator[Median]:
    yield "limit.read", limits.read_bytes_per_s / 1e9, "GB/s"
    yield "limit.multiply", limits.operations_per_s / 1e9, "GFLOP/s"


def _prefill(run: Run) -> Iterator[Median]:
    for length in PREFILL_LENGTHS:
        work = step_work(run.model, run.number_bytes, [(length, length)])
        whole_s = median(each.prefill_s[length] for each in run.passes)
        chunked_s = median(each.chunked_prefill_s[length] for each in run.passes)
        yield f"prefill_{length}.rate", length / whole_s, "tokens/s"
        yield from _against_limits(f"prefill_{length}", work, whole_s, run.limits)
        yield f"prefill_in_chunks_{length}.rate", length / chunked_s, "tokens/s"
        # chunks multiply as much as the whole; what they read again is not counted
        chunked_share = work.num_operations / chunked_s / run.limits.operations_per_s
        yield f"prefill_in_chunks_{length}.multiply_share", chunked_share, "of the limit"


def _decode(run: Run) -> Iterator[Median]:
    for point in DECODE_POINTS:
        key, step_s = f"decode_{point.batch}x{point.context}", _step_s(run, point)
        outside = median(each.decode[point].share_outside_kernels for each in run.passes)
        yield f"{key}.tpot", step_s * 1e3, "ms"
        yield f"{key}.rate", point.batch / step_s, "tokens/s"
        yield from _against_limits(key, _decode_work(run, point), step_s, run.limits)
        yield f"{key}.python_share", outside, "of the step"
        yield f"{key}.python_time", outside * step_s * 1e3, "ms"


def _against_limits(key: str, work: Work, seconds: float, limits: Limits) -> Iterator[Median]:
    yield f"{key}.bytes", work.num_bytes, "bytes"
    yield f"{key}.operations", work.num_operations, "operations"
    yield f"{key}.read_share", work.num_bytes / seconds / limits.read_bytes_per_s, "of the limit"
    yield f"{key}.multiply_share", work.num_operations / seconds / limits.operations_per_s, "of the limit"


def _context_cost(run: Run) -> Iterator[Median]:
    short, long = DecodePoint(GROWTH_BATCH, SHORT), DecodePoint(GROWTH_BATCH, LONG)
    extra_bytes = _decode_work(run, long).num_bytes - _decode_work(run, short).num_bytes
    extra_s = median(each.decode[long].step_s - each.decode[short].step_s for each in run.passes)
    cost = extra_s / (extra_bytes / run.limits.read_bytes_per_s)
    yield f"decode_{GROWTH_BATCH}.context_cost", cost, "times the KV's read time"


def _sampling(run: Run) -> Iterator[Median]:
    for point in SAMPLING_POINTS:
        key, seconds = f"sampling_{point.kind}_{point.rows}", median(each.sampling_s[point] for each in run.passes)
        yield f"{key}.row_time", seconds / point.rows * 1e3, "ms"
        yield f"{key}.step_share", seconds / _step_s(run, DecodePoint(point.rows, SHORT)), "of a step"


def _transformers(run: Run) -> Iterator[Median]:
    prefill_s = median(each.reference_prefill_s for each in run.passes)
    step_s = median(each.reference_step_s for each in run.passes)
    ours_s = median(each.prefill_s[COMPARED_LENGTH] for each in run.passes)
    key = f"prefill_{COMPARED_LENGTH}"
    yield f"transformers.{key}.rate", COMPARED_LENGTH / prefill_s, "tokens/s"
    yield f"transformers.{key}.times_faster", prefill_s / ours_s, "times"
    point = DecodePoint(1, SHORT)
    yield f"transformers.decode_1x{SHORT}.tpot", step_s * 1e3, "ms"
    yield f"transformers.decode_1x{SHORT}.times_faster", step_s / _step_s(run, point), "times"


def _step_s(run: Run, point: DecodePoint) -> float:
    return median(each.decode[point].step_s for each in run.passes)


def _decode_work(run: Run, point: DecodePoint) -> Work:
    return step_work(run.model, run.number_bytes, [(1, round(point.seq_len))] * point.batch)
