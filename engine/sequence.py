"""One prompt and its answer as the engine sees them: tokens, computed tokens, blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.block_hash import BlockHash, extend_chain
from common.sampling import FinishReason, SamplingParams


@dataclass(eq=False)
class Sequence:
    """Phase-free: `num_computed_tokens` chases `num_tokens`. Compared by identity; only the engine's thread changes it.

    A sequence with one token left to compute is decoding, one with more is prefilling; nothing else tells them apart.
    """

    token_ids: list[int]  # the prompt, then every sampled token
    sampling: SamplingParams
    num_prompt_tokens: int = field(init=False)
    num_computed_tokens: int = 0  # tokens whose K and V are in the cache
    block_table: list[int] = field(default_factory=list)
    cache_salt: bytes = b""  # prompts of different salts never share a cached block
    block_hashes: list[BlockHash] = field(default_factory=list)  # of the full blocks of token_ids, as far as computed

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    def full_block_hashes(self, num_tokens: int, block_size: int) -> list[BlockHash]:
        """Hashes of the full blocks among the first `num_tokens` tokens."""
        extend_chain(self.block_hashes, self.token_ids, block_size, self.cache_salt)
        return self.block_hashes[: num_tokens // block_size]

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens


@dataclass(frozen=True)
class ScheduledSequence:
    """A sequence's part in one step: tokens [start, start + num_scheduled_tokens)."""

    sequence: Sequence
    start: int
    num_scheduled_tokens: int

    @property
    def end(self) -> int:
        return self.start + self.num_scheduled_tokens

    @property
    def is_sampled(self) -> bool:
        """Whether this step computes the sequence's last token, and so samples the next one."""
        return self.end == self.sequence.num_tokens


@dataclass(frozen=True)
class SampledToken:
    """What one step gave one sequence."""

    sequence: Sequence
    token_id: int
    finish_reason: FinishReason | None
