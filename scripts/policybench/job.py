"""One request of a trace on its way through the simulation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from common.block_hash import HASH_BYTES, BlockHash
from loadgen.trace import HASH_BLOCK_TOKENS, TraceRow

BLOCK_SIZE = HASH_BLOCK_TOKENS


@dataclass(eq=False)
class Job:
    arrival_s: float
    input_tokens: int
    output_tokens: int
    hashes: list[BlockHash]  # of the prompt's full blocks; equal hashes are equal prefixes
    ttft_s: float = 0.0
    tpot_s: float | None = None  # None where the first token is the only one
    cached_tokens: int = 0  # found on the prefill worker
    moved_tokens: int = 0  # whose KV the decode worker lacked
    prefill_blocks: list[int] = field(default_factory=list)  # block tables
    decode_blocks: list[int] = field(default_factory=list)

    @property
    def reusable(self) -> list[BlockHash]:
        """Without the block that ends with the last token, which is always computed."""
        return self.hashes[: (self.input_tokens - 1) // BLOCK_SIZE]


def jobs_of(rows: Iterable[TraceRow], speed: float) -> Iterator[Job]:
    """A trace without hash ids has no two prompts with anything in common."""
    start_s: float | None = None
    for row in rows:
        start_s = row.timestamp_s if start_s is None else start_s
        full_blocks = row.hash_ids[: row.input_tokens // BLOCK_SIZE]
        hashes = [hash_id.to_bytes(HASH_BYTES) for hash_id in full_blocks]
        yield Job((row.timestamp_s - start_s) / speed, row.input_tokens, row.output_tokens, hashes)
