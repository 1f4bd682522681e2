"""Passes over everything, in turns: what disturbs the machine then disturbs every figure alike.

A prompt never repeats, so no prefix cache shortens it. Decoding sequences arrive as a decode worker's do: blocks are
reserved, K and V written from outside, the first token given. So a long context costs no prefill here.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from common.sampling import SamplingParams
from engine.engine import Engine
from engine.native.kernels import NativeKernels
from engine.sequence import Sequence as EngineSequence
from enginebench.clock import share_outside_kernels
from enginebench.limits import Probe
from enginebench.reference import Reference
from enginebench.threads import torch_threads

PREFILL_LENGTHS = (128, 512, 1024, 2048)
BATCHES = (1, 4, 8, 16, 32)
SHORT, LONG = 64, 1024  # tokens of context
COMPARED_LENGTH = 512  # of transformers' prefill
WARM_UP_STEPS, TIMED_STEPS, CLOCKED_STEPS = 2, 16, 8
MAX_STEPS = 64  # more than all of these, the clocked ones twice: no sequence finishes by itself
PROBE_REPEATS = 3


@dataclass(frozen=True)
class DecodePoint:
    batch: int
    context: int  # tokens that each sequence has in the cache before the first step

    @property
    def seq_len(self) -> float:
        """The mean over the timed steps."""
        return self.context + WARM_UP_STEPS + (TIMED_STEPS + 1) / 2


@dataclass(frozen=True)
class SamplingPoint:
    kind: str  # a key of SAMPLING
    rows: int


DECODE_POINTS = tuple(DecodePoint(batch, context) for context in (SHORT, LONG) for batch in BATCHES)
SAMPLING: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 50},
}
SAMPLING_POINTS = tuple(SamplingPoint(kind, rows) for kind in SAMPLING for rows in (1, max(BATCHES)))
LOGITS_STD = 3.0  # some 2,000 of 49,152 tokens then hold 0.9 of the probability, many for a language model
CAPACITY_TOKENS = max(BATCHES) * (LONG + 2 * MAX_STEPS)  # half of that fills up last blocks


@dataclass(frozen=True)
class DecodeSample:
    step_s: float
    share_outside_kernels: float  # of steps of their own, see clock.py


@dataclass(frozen=True)
class Pass:
    """Everything once."""

    prefill_s: dict[int, float]  # by prompt length, the whole prompt in one step
    chunked_prefill_s: dict[int, float]  # with the default token budget of a step
    decode: dict[DecodePoint, DecodeSample]
    sampling_s: dict[SamplingPoint, float]  # all rows once
    reference_prefill_s: float  # of COMPARED_LENGTH tokens
    reference_step_s: float  # of one sequence with SHORT context


@dataclass(frozen=True)
class Subjects:
    """What takes turns."""

    whole: Engine  # its step takes the longest prompt whole
    chunked: Engine
    reference: Reference
    kernels: NativeKernels | None  # of this machine, whether or not the engines use them
    probe: Probe
    num_threads: int


def measure(subjects: Subjects, repeats: int, on_pass: Callable[[int, float], object]) -> list[Pass]:
    """on_pass(number, seconds): a pass has ended. A first pass warms everything up and is thrown away."""
    prompts = Prompts(subjects.whole.limits.vocab_size)
    passes = []
    for number in range(repeats + 1):
        start = time.perf_counter()
        passes.append(_measure_once(subjects, prompts))
        on_pass(number, time.perf_counter() - start)
    return passes[1:]


class Prompts:
    """Random, and different every time."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._random = random.Random(0)

    def next(self, num_tokens: int) -> list[int]:
        return self._random.choices(range(self._vocab_size), k=num_tokens)


def _measure_once(subjects: Subjects, prompts: Prompts) -> Pass:
    whole_s, chunked_s = {}, {}
    for length in PREFILL_LENGTHS:
        whole_s[length] = prefill_s(subjects.whole, prompts.next(length))
        chunked_s[length] = prefill_s(subjects.chunked, prompts.next(length))
    with torch_threads(subjects.num_threads):
        reference_prefill_s = subjects.reference.prefill_s(prompts.next(COMPARED_LENGTH))
        reference_step_s = subjects.reference.decode_step_s(prompts.next(SHORT), WARM_UP_STEPS, TIMED_STEPS)
    decoded = {}
    for point in DECODE_POINTS:
        subjects.probe.run(PROBE_REPEATS)
        decoded[point] = _decode(subjects.whole, subjects.kernels, point, prompts)
    sampling_s = {point: _sampling_s(subjects.whole, point) for point in SAMPLING_POINTS}
    return Pass(whole_s, chunked_s, decoded, sampling_s, reference_prefill_s, reference_step_s)


def prefill_s(engine: Engine, token_ids: list[int]) -> float:
    """Queued → first token."""
    sequence = EngineSequence(token_ids, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
    start = time.perf_counter()
    engine.add(sequence)
    while engine.has_work:
        step(engine)
    return time.perf_counter() - start


def _decode(engine: Engine, kernels: NativeKernels | None, point: DecodePoint, prompts: Prompts) -> DecodeSample:
    with decoding(engine, point, prompts):
        _steps(engine, WARM_UP_STEPS)
        start = time.perf_counter()
        _steps(engine, TIMED_STEPS)
        step_s = (time.perf_counter() - start) / TIMED_STEPS
        return DecodeSample(step_s, share_outside_kernels(lambda: _steps(engine, CLOCKED_STEPS), kernels))


@contextmanager
def decoding(engine: Engine, point: DecodePoint, prompts: Prompts) -> Iterator[None]:
    """Meanwhile the point's sequences are all that the engine has."""
    kv = _kv(engine, point.context)
    sequences = [_decoding(engine, prompts.next(point.context), kv) for _ in range(point.batch)]
    yield
    for sequence in sequences:
        engine.remove(sequence)


@torch.inference_mode()
def _sampling_s(engine: Engine, point: SamplingPoint) -> float:
    logits = torch.randn(point.rows, engine.limits.vocab_size) * LOGITS_STD
    params = [SamplingParams(1, seed=seed, **SAMPLING[point.kind]) for seed in range(point.rows)]  # type: ignore[arg-type]
    start = time.perf_counter()
    for step in range(TIMED_STEPS):
        engine.sampler(logits, params, [step] * point.rows).tolist()
    return (time.perf_counter() - start) / TIMED_STEPS


def _kv(engine: Engine, num_tokens: int) -> Tensor:
    """Numbers of an ordinary size: garbage could hold NaN or subnormals, which take another time."""
    layout = engine.layout
    shape = (layout.num_layers, 2, num_tokens, layout.num_kv_heads, layout.head_dim)
    return torch.rand(shape, dtype=getattr(torch, layout.dtype)) - 0.5


def _decoding(engine: Engine, token_ids: list[int], kv: Tensor) -> EngineSequence:
    sequence = EngineSequence(token_ids, SamplingParams(max_tokens=MAX_STEPS, temperature=0.0, ignore_eos=True))
    engine.reserve(sequence)
    engine.write_kv(sequence, 0, 0, kv)
    engine.activate(sequence, first_token=0)
    return sequence


def _steps(engine: Engine, count: int) -> None:
    for _ in range(count):
        step(engine)


def step(engine: Engine) -> None:
    assert engine.step(_Unobserved()), "the bench has reserved what its sequences need"


class _Unobserved:
    def on_scheduled(self, scheduled: Sequence[Any]) -> None: ...

    def on_sampled(self, sampled: Sequence[Any]) -> None: ...
