"""How long the router's prefix index takes to answer, full, for many workers."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

import numpy as np

from common.block_hash import HASH_BYTES, BlockHash
from router.prefix_index import PrefixIndex

NUM_BLOCKS = 100_000
NUM_WORKERS = 64
PROMPT_BLOCKS = 64  # 1,024 tokens in blocks of 16
NUM_QUERIES = 2000
TRIES = 5  # of each query, of which the fastest counts: what else runs on the machine is not the index's time


@dataclass(frozen=True)
class IndexSpeed:
    query_p50_s: float
    query_p99_s: float
    update_block_s: float  # to learn or to forget one block of one worker
    leave_s: float  # to forget a worker


def measure_index(seed: int = 0, num_blocks: int = NUM_BLOCKS) -> IndexSpeed:
    """Each prompt is held by another half of the workers: by one as a whole, by the others as far as it happens."""
    rng = random.Random(seed)
    workers = [f"worker-{number}" for number in range(NUM_WORKERS)]
    prompts = [[rng.randbytes(HASH_BYTES) for _ in range(PROMPT_BLOCKS)] for _ in range(num_blocks // PROMPT_BLOCKS)]
    index = PrefixIndex(2 * num_blocks)
    for worker in workers:
        index.join(worker)
    update_s = list(_updates(index, workers, prompts, rng))
    query_s = [min(_query_s(index, prompt) for _ in range(TRIES)) for prompt in rng.choices(prompts, k=NUM_QUERIES)]
    start_s = time.perf_counter()
    index.leave(workers[0])
    leave_s = time.perf_counter() - start_s
    return IndexSpeed(median(query_s), float(np.percentile(query_s, 99)), median(update_s), leave_s)


def _updates(
    index: PrefixIndex, workers: list[str], prompts: list[list[BlockHash]], rng: random.Random
) -> Iterator[float]:
    """Fill the index. Seconds per block."""
    for prompt in prompts:
        holders = rng.sample(workers, len(workers) // 2)
        lengths = [len(prompt), *(rng.randint(1, len(prompt)) for _ in holders[1:])]
        for worker, length in zip(holders, lengths, strict=True):
            start_s = time.perf_counter()
            index.update(worker, prompt[:length], [])
            yield (time.perf_counter() - start_s) / length


def _query_s(index: PrefixIndex, prompt: list[BlockHash]) -> float:
    start_s = time.perf_counter()
    index.leading_blocks(prompt)
    return time.perf_counter() - start_s
