"""Whether to split prefill from decode, in numbers: what it does to running streams, and what it costs. Pure functions.

a colocated worker, streams running     | step + chunk | step + chunk | step + chunk |   until the prompt is computed
a decode worker beside a prefill worker | step | step | step | step | step | step |     and the handoff at its end
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from typing import NamedTuple

from kv_transfer.plan import suitable_piece_bytes
from kv_transfer.transport import LinkSpeed

FELT_GAP = 1.5  # times the step alone: what streams feel of a prompt beside them
DEAR_HANDOFF = 0.25  # of the prompt's computation
MIN_CHUNK_TOKENS = 16  # a prompt moves on by as many whatever the streams' goal (engine/pace.py)
MAX_POOL = 8  # workers, in a ratio to start with
MIN_STREAMS = 4  # with fewer at a time nobody knows how many a decode worker can carry


class Verdict(Enum):
    SPLIT = "split"
    EITHER = "either"
    COLOCATE = "colocate"


@dataclass(frozen=True)
class Speeds:
    """What one worker does, measured."""

    prefill_s_per_token: float
    step_s: float  # of decode, with num_streams running
    num_streams: int
    max_chunk_tokens: int  # prompt tokens in one step
    tpot_goal_s: float


@dataclass(frozen=True)
class Prompt:
    num_tokens: int
    output_tokens: int
    kv_bytes: int
    prefill_s: float
    handoff_s: float  # from the first token until the decode worker has everything


class PoolRatio(NamedTuple):
    prefill: int
    decode: int
    is_most: bool  # of the larger pool even more would be busy


@dataclass(frozen=True)
class Advice:
    prompt: Prompt
    colocated_gap_s: float  # between tokens of running streams while the prompt is computed beside them
    split_gap_s: float
    ratio: PoolRatio | None  # None: unknown, too few streams were measured together
    verdict: Verdict

    @property
    def reason(self) -> str:
        colocated, split = f"{self.colocated_gap_s * 1e3:.0f}", f"{self.split_gap_s * 1e3:.0f}"
        gaps = f"while one is computed, running streams get a token every {split} ms if split, {colocated} if colocated"
        handoff = f"its handoff adds {self.prompt.handoff_s * 1e3:.1f} ms to {self.prompt.prefill_s * 1e3:.0f}"
        match self.verdict:
            case Verdict.COLOCATE:
                return f"{handoff}: that is too much"
            case Verdict.EITHER:
                return f"{gaps}: they hardly feel it"
            case Verdict.SPLIT:
                return f"{gaps}; {handoff}"


def advise(prompt: Prompt, speeds: Speeds) -> Advice:
    gap_s = colocated_gap_s(prompt.num_tokens, speeds)
    if prompt.handoff_s > DEAR_HANDOFF * prompt.prefill_s:
        verdict = Verdict.COLOCATE
    elif gap_s < FELT_GAP * speeds.step_s:
        verdict = Verdict.EITHER
    else:
        verdict = Verdict.SPLIT
    ratio = pool_ratio(prompt, speeds) if speeds.num_streams >= MIN_STREAMS else None
    return Advice(prompt, gap_s, speeds.step_s, ratio, verdict)


def colocated_gap_s(prompt_tokens: int, speeds: Speeds) -> float:
    """A step that also computes as much of a prompt as it may: a whole chunk, or what the streams' goal leaves."""
    s_per_token = speeds.prefill_s_per_token
    chunk_s = min(prompt_tokens, speeds.max_chunk_tokens) * s_per_token
    left_s = max(speeds.tpot_goal_s - speeds.step_s, MIN_CHUNK_TOKENS * s_per_token)
    return speeds.step_s + min(chunk_s, left_s)


def pool_ratio(prompt: Prompt, speeds: Speeds) -> PoolRatio:
    """The smallest numbers of workers that keep both pools about equally busy with such requests."""
    decode_s = prompt.output_tokens * speeds.step_s / speeds.num_streams  # of a worker's time, for one stream of many
    wanted = prompt.prefill_s / decode_s
    candidates = [Fraction(p, d) for p in range(1, MAX_POOL) for d in range(1, MAX_POOL + 1 - p)]

    def unlikeness(ratio: Fraction) -> float:
        uneven = float(ratio) / wanted if ratio > wanted else wanted / float(ratio)
        return uneven + 0.05 * (ratio.numerator + ratio.denominator)  # a worker more must be worth it

    best = min(candidates, key=unlikeness)
    most = MAX_POOL - 1
    return PoolRatio(best.numerator, best.denominator, is_most=not 1 / most <= wanted <= most)


def predicted_handoff_s(kv_bytes: int, prefill_s: float, link: LinkSpeed) -> float:
    """KV leaves while later layers are computed; what is left at the end is the last piece, or what the link could not
    keep up with, and a commit's round trip."""
    last_piece_s = min(kv_bytes, suitable_piece_bytes(link)) / link.bytes_per_s
    return 2 * link.round_trip_s + max(kv_bytes / link.bytes_per_s - prefill_s, last_piece_s)
