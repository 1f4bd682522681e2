"""The speeds of engines that differ in one thing, in turns."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from statistics import median

from engine.engine import Engine
from enginebench.measure import COMPARED_LENGTH, SHORT, TIMED_STEPS, DecodePoint, Prompts, decoding, prefill_s, step

BATCHES = (1, 8, 32)
PREFILLS = 3  # in a pass
Speeds = dict[str, dict[str, float]]  # ms, by what is timed and then by the engine's name


def measure_beside(engines: Mapping[str, Engine], repeats: int) -> Speeds:
    """Medians. Engines take turns step by step, so whatever disturbs the machine disturbs all alike. A first pass warms
    everything up and is thrown away."""
    prompts = {name: Prompts(engine.limits.vocab_size) for name, engine in engines.items()}
    taken: dict[str, dict[str, list[float]]] = {}
    for number in range(repeats + 1):
        if number == 1:
            taken.clear()
        for batch in BATCHES:
            for name, seconds in _decode(engines, DecodePoint(batch, SHORT), prompts):
                taken.setdefault(f"TPOT, batch {batch}", {}).setdefault(name, []).append(seconds * 1e3)
        for _ in range(PREFILLS):
            for name, engine in engines.items():
                seconds = prefill_s(engine, prompts[name].next(COMPARED_LENGTH))
                taken.setdefault(f"prefill of {COMPARED_LENGTH} tokens", {}).setdefault(name, []).append(seconds * 1e3)
    return {what: {name: median(each) for name, each in by_name.items()} for what, by_name in taken.items()}


def _decode(
    engines: Mapping[str, Engine], point: DecodePoint, prompts: Mapping[str, Prompts]
) -> Iterator[tuple[str, float]]:
    """Single steps of each engine."""
    with ExitStack() as stack:
        for name, engine in engines.items():
            stack.enter_context(decoding(engine, point, prompts[name]))
        for _ in range(TIMED_STEPS):
            for name, engine in engines.items():
                start = time.perf_counter()
                step(engine)
                yield name, time.perf_counter() - start
