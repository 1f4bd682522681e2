"""Four kinds of traffic that splitting prefill from decode treats differently."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from loadgen.trace import TraceRow
from loadgen.workload import LengthRange, Workload


@dataclass(frozen=True)
class Shape:
    name: str
    input_tokens: LengthRange
    output_tokens: LengthRange


SHORT_CHAT = Shape("short chat", LengthRange(64, 256), LengthRange(32, 96))
LONG_PROMPT = Shape("long prompt, short answer", LengthRange(1200, 1600), LengthRange(8, 24))
LONG_ANSWER = Shape("short prompt, long answer", LengthRange(32, 128), LengthRange(192, 320))
SHAPES = (SHORT_CHAT, LONG_PROMPT, LONG_ANSWER)
MIX = "mix"  # each request is of one of the shapes, by lot


def named_workloads(base: Workload) -> dict[str, Workload]:
    """`base` with the lengths of each, under seeds of their own: no prompt begins like one of another workload.

    `base` says how many requests there are, and when they come.
    """
    workloads = {shape.name: (shape,) for shape in SHAPES} | {MIX: SHAPES}
    return {
        name: _with_lengths(replace(base, seed=base.seed + 10 * index), shapes)
        for index, (name, shapes) in enumerate(workloads.items())
    }


def _with_lengths(workload: Workload, shapes: tuple[Shape, ...]) -> Workload:
    assert workload.num_requests is not None
    rng = random.Random(workload.seed)
    rows = []
    for _ in range(workload.num_requests):
        shape = rng.choice(shapes)
        rows.append(TraceRow(0.0, _drawn(rng, shape.input_tokens), _drawn(rng, shape.output_tokens)))
    return replace(workload, trace=tuple(rows))


def _drawn(rng: random.Random, lengths: LengthRange) -> int:
    return rng.randint(lengths.low, lengths.high)
