"""What is sent and when: arrival times, lengths and prompts, all drawn from one seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import count, repeat

import numpy as np

from loadgen.trace import HASH_BLOCK_TOKENS, TraceRow

NUM_SKIPPED_IDS = 300  # the lowest ids are special tokens and, in Llama's vocabulary, raw bytes

# Frequent English words, one token each in the usual vocabularies.
_FREQUENT = """
    the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one
    you were all her she there would their we him been has when who will no more if out so up said what its about than
    into them can only other time new some could these two may first then do any like my now over such our man
"""
WORDS = tuple(_FREQUENT.split())


class PromptKind(StrEnum):
    IDS = "ids"  # token ids: exact lengths
    TEXT = "text"  # one word per token asked for: the server's own count is what gets reported


@dataclass(frozen=True)
class LengthRange:
    """Token counts drawn evenly from [low, high]."""

    low: int
    high: int

    @staticmethod
    def parse(text: str) -> LengthRange:
        """`512`, or `128:1024`. Raises: ValueError."""
        low, colon, high = text.partition(":")
        try:
            lengths = LengthRange(int(low), int(high if colon else low))
        except ValueError:
            raise ValueError("neither a length such as 512 nor a range such as 128:1024") from None
        if not 1 <= lengths.low <= lengths.high:
            raise ValueError("a length is at least 1, and a range goes from low to high, as 128:1024")
        return lengths


@dataclass(frozen=True)
class Poisson:
    """Open loop: requests arrive at random, whether or not earlier ones were answered."""

    rate: float  # requests per second; inf sends all at once


@dataclass(frozen=True)
class Constant:
    """Open loop: one request every 1/rate seconds."""

    rate: float


@dataclass(frozen=True)
class Burst:
    """Open loop: `size` requests at the same moment, then nothing until the mean rate is `rate`."""

    rate: float  # requests per second
    size: int


@dataclass(frozen=True)
class Replay:
    """Open loop: requests arrive when the trace says."""

    speed: float = 1.0  # 2 replays in half the time


@dataclass(frozen=True)
class ClosedLoop:
    """A fixed number of clients, each sending its next request when the last one was answered."""

    concurrency: int


Pacing = Poisson | Constant | Burst | Replay | ClosedLoop


@dataclass(frozen=True)
class Workload:
    """One seeded schedule. Two runs of the same workload send the same requests."""

    pacing: Pacing
    input_tokens: LengthRange = LengthRange(512, 512)
    output_tokens: LengthRange = LengthRange(64, 64)
    trace: tuple[TraceRow, ...] = ()  # when given, lengths come from here
    prompt_kind: PromptKind = PromptKind.IDS
    vocab_size: int = 30_000
    num_requests: int | None = None  # None: as many as the trace or the duration holds
    duration_s: float | None = None
    seed: int = 0

    @property
    def num_planned(self) -> int | None:
        """How many requests there will be, where that is known beforehand."""
        if self.duration_s is not None:
            return None
        limits = [self.num_requests] if self.num_requests is not None else []
        return min(limits + ([len(self.trace)] if self.trace else []), default=None)


@dataclass(frozen=True)
class PlannedRequest:
    arrival_s: float  # after the start; 0 in a closed loop
    prompt: list[int] | str
    input_tokens: int
    output_tokens: int


def plan(workload: Workload) -> Iterator[PlannedRequest]:
    """The requests in order of arrival. Prompts are made one at a time, so a long trace needs little memory."""
    rows = iter(workload.trace) if workload.trace else _drawn_rows(workload)
    arrivals = _arrivals(workload)
    for index in count():
        if index == workload.num_requests:
            return
        row = next(rows, None)
        if row is None:
            return
        arrival_s = next(arrivals)
        if workload.duration_s is not None and arrival_s >= workload.duration_s:
            return
        yield PlannedRequest(arrival_s, _prompt(workload, index, row), row.input_tokens, row.output_tokens)


def _arrivals(workload: Workload) -> Iterator[float]:
    match workload.pacing:
        case ClosedLoop():
            return repeat(0.0)
        case Replay(speed):
            return ((row.timestamp_s - workload.trace[0].timestamp_s) / speed for row in workload.trace)
        case Poisson(rate):
            return _poisson_arrivals(_stream(workload.seed, "arrivals"), rate)
        case Constant(rate):
            return (index / rate for index in count())
        case Burst(rate, size):
            return (index // size * size / rate for index in count())


def _poisson_arrivals(rng: np.random.Generator, rate: float) -> Iterator[float]:
    now_s = 0.0
    while True:
        now_s += rng.exponential(1 / rate)
        yield now_s


def _drawn_rows(workload: Workload) -> Iterator[TraceRow]:
    rng = _stream(workload.seed, "lengths")
    inputs, outputs = workload.input_tokens, workload.output_tokens
    while True:
        num_input = int(rng.integers(inputs.low, inputs.high, endpoint=True))
        yield TraceRow(0.0, num_input, int(rng.integers(outputs.low, outputs.high, endpoint=True)))


def _prompt(workload: Workload, index: int, row: TraceRow) -> list[int] | str:
    """A prompt of its own, or, where the trace has hash ids, the same tokens wherever the same hash id stands."""
    picks = _picks(workload, index, row)
    if workload.prompt_kind is PromptKind.TEXT:
        return " ".join(WORDS[pick] for pick in picks)
    return picks


def _picks(workload: Workload, index: int, row: TraceRow) -> list[int]:
    if not row.hash_ids:
        return _drawn(workload, _stream(workload.seed, "prompt", index), row.input_tokens)
    blocks = [_drawn(workload, _stream(workload.seed, "block", hash_id), HASH_BLOCK_TOKENS) for hash_id in row.hash_ids]
    return [pick for block in blocks for pick in block][: row.input_tokens]


def _drawn(workload: Workload, rng: np.random.Generator, num_tokens: int) -> list[int]:
    """Token ids, or places in WORDS."""
    if workload.prompt_kind is PromptKind.TEXT:
        low, high = 0, len(WORDS)
    else:
        low, high = min(NUM_SKIPPED_IDS, workload.vocab_size // 2), workload.vocab_size
    picks: list[int] = rng.integers(low, high, size=num_tokens).tolist()
    return picks


def _stream(seed: int, purpose: str, index: int = 0) -> np.random.Generator:
    """A generator of its own per purpose, so that more draws in one never shift another."""
    return np.random.default_rng([seed, index, *purpose.encode()])
