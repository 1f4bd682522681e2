"""What the client asked of the sampler, and the reasons an answer ends."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from common.errors import InvalidSampling
from common.pb import serving_pb2 as pb

MAX_SEED = 2**63 - 1


class FinishReason(StrEnum):
    """Why an answer ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True)
class SamplingParams:
    """How to turn logits into tokens, and when to stop. Validated on construction.

    temperature 0 is greedy. top_k 0 and top_p 1 are off. The noise depends on (seed, position, token id) alone.
    Raises: InvalidSampling naming the field and its allowed range.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        _require(
            0 <= self.temperature <= 2,
            "temperature",
            self.temperature,
            "from 0 to 2",
        )
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _require(self.top_k >= 0, "top_k", self.top_k, "0 (off) or more")
        _require(0 <= self.seed <= MAX_SEED, "seed", self.seed, f"from 0 to {MAX_SEED}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    def to_pb(self) -> pb.SamplingParams:
        return pb.SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop_token_ids,
        )

    @staticmethod
    def from_pb(message: pb.SamplingParams) -> SamplingParams:
        """Between our own processes every field is set; an unset one takes this class's default."""
        return SamplingParams(
            max_tokens=message.max_tokens,
            temperature=message.temperature if message.HasField("temperature") else 1.0,
            top_p=message.top_p if message.HasField("top_p") else 1.0,
            top_k=message.top_k,
            seed=message.seed,
            ignore_eos=message.ignore_eos,
            stop_token_ids=tuple(message.stop_token_ids),
        )


def _require(is_valid: bool, name: str, value: object, allowed: str) -> None:
    if not is_valid:
        raise InvalidSampling(f"{name} is {value}; it must be {allowed}", param=name)
