"""From the samples of one configuration to its figures: medians, each with a name that stays the same.

| metric | what it is |
|---|---|
| time_to_ready | the processes are started → the router says that they can serve |
| ttft | request at the router → first token there; one request, nothing else running |
| prefill_rate | prompt tokens / ttft |
| decode_step | the gap between tokens at the client, from the second on; one request |
| exposed_handoff | the gap between the first and the second token at the client, less a decode step |
| transfer | first token at the router → KV verified and the sequence scheduled on the decode worker |
| decode_wait | scheduled there → its first token at the router: one decode step, and what is lost around it |
| transfer_size | KV that the prefill worker sent |
| tpot | (end-to-end − ttft) / (output tokens − 1), of each of several simultaneous streams |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

READY_GOAL_S = 40.0


@dataclass(frozen=True)
class PromptSample:
    """One request to an idle system, in seconds."""

    ttft_s: float
    first_gap_s: float  # first token at the client → second token at the client
    decode_step_s: float  # the median gap between the tokens after that
    handoff: HandoffSample | None  # None: colocated, there is none

    @property
    def exposed_handoff_s(self) -> float:
        """Compared with the decode steps of its own request: a step grows with the prompt it attends to."""
        return self.first_gap_s - self.decode_step_s


@dataclass(frozen=True)
class HandoffSample:
    transfer_s: float  # the router's stages of these names, see common/lifecycle.py
    decode_wait_s: float
    num_bytes: int  # of KV that the prefill worker sent


@dataclass(frozen=True)
class Pass:
    """Everything once."""

    prompts: dict[int, PromptSample]  # by prompt length
    tpot_s: dict[int, list[float]]  # by number of streams: one of each stream


@dataclass(frozen=True)
class Figure:
    """One measured number. `at_most` is its goal, where it has one."""

    configuration: str  # "pair_grpc"
    metric: str  # "ttft"
    at: str  # "2048_prompt_tokens"; "" where there is no such choice
    value: float
    unit: str
    at_most: float | None = None

    @property
    def name(self) -> str:
        return f"{self.configuration}.{self.metric}" + (f"_at_{self.at}" if self.at else "")

    @property
    def holds(self) -> bool | None:
        return None if self.at_most is None else self.value <= self.at_most


def figures_of(configuration: str, ready_s: Sequence[float], passes: Sequence[Pass]) -> list[Figure]:
    """The medians over starts and over passes."""
    figures = [Figure(configuration, "time_to_ready", "", median(ready_s), "s", READY_GOAL_S)]
    for metric, at, value, unit in (*_prompt_medians(passes), *_stream_medians(passes)):
        figures.append(Figure(configuration, metric, at, value, unit))
    return figures


def figures_json(figures: Iterable[Figure]) -> list[dict[str, Any]]:
    return [
        {
            "name": figure.name,
            "value": figure.value,
            "unit": figure.unit,
            "goal": None if figure.at_most is None else f"<= {figure.at_most:g}",
            "holds": figure.holds,
        }
        for figure in figures
    ]


Median = tuple[str, str, float, str]  # metric, at, value, unit


def _prompt_medians(passes: Sequence[Pass]) -> Iterator[Median]:
    for num_tokens in passes[0].prompts:
        at = f"{num_tokens}_prompt_tokens"
        samples = [each.prompts[num_tokens] for each in passes]
        ttft_s = median(sample.ttft_s for sample in samples)
        yield "ttft", at, ttft_s * 1e3, "ms"
        yield "prefill_rate", at, num_tokens / ttft_s, "tokens/s"
        yield "decode_step", at, median(sample.decode_step_s for sample in samples) * 1e3, "ms"
        yield from _handoff_medians(at, samples)


def _handoff_medians(at: str, samples: Sequence[PromptSample]) -> Iterator[Median]:
    handoffs = [sample.handoff for sample in samples if sample.handoff is not None]
    if not handoffs:
        return
    exposed_s = median(sample.exposed_handoff_s for sample in samples)
    parts: tuple[tuple[str, Callable[[HandoffSample], float]], ...] = (
        ("transfer", lambda handoff: handoff.transfer_s),
        ("decode_wait", lambda handoff: handoff.decode_wait_s),
    )
    yield "exposed_handoff", at, exposed_s * 1e3, "ms"
    for metric, seconds in parts:
        yield metric, at, median(map(seconds, handoffs)) * 1e3, "ms"
    yield "transfer_size", at, float(median(handoff.num_bytes for handoff in handoffs)), "bytes"


def _stream_medians(passes: Sequence[Pass]) -> Iterator[Median]:
    for num_streams in passes[0].tpot_s:
        of_every_stream = [tpot_s for each in passes for tpot_s in each.tpot_s[num_streams]]
        at = "1_stream" if num_streams == 1 else f"{num_streams}_streams"
        yield "tpot", at, median(of_every_stream) * 1e3, "ms"
