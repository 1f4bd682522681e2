"""Tokens per second of an engine on a Llama-3-8B-shaped model, and how near that is to what the device can do."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from common.sampling import SamplingParams
from engine.engine import Engine
from engine.sequence import Sequence
from gpucheck.figures import Figure, at_least, plain, skipped
from gpucheck.generation import Unwatched
from gpucheck.random_llama import Cost
from gpucheck.timing import Limits, synchronize

SHARE_OF_READ_BANDWIDTH = 0.70
SHARE_OF_MATRIX_RATE = 0.75


@dataclass(frozen=True)
class Load:
    prefill_tokens: tuple[int, ...] = (512, 2048)
    decode_batches: tuple[int, ...] = (1, 8, 32, 64)
    decode_context: int = 512  # tokens of each sequence before the first measured step
    num_steps: int = 32
    num_prompts: int = 5


@dataclass(frozen=True)
class Speed:
    """Random prompts throughout: a repeated one would come from the prefix cache."""

    engine: Engine
    cost: Cost
    limits: Limits

    def figures(self, load: Load) -> Iterator[Figure]:
        random = Random(0)
        for num_tokens in load.prefill_tokens:
            yield from self._prefill(num_tokens, load.num_prompts, random)
        for batch in load.decode_batches:
            yield from self._decode(batch, load, random)

    def _prefill(self, num_tokens: int, num_prompts: int, random: Random) -> Iterator[Figure]:
        times = [self._prefill_s(num_tokens, random) for _ in range(num_prompts + 1)]
        prefill_s = statistics.median(times[1:])  # the first compiles kernels
        yield plain(f"prefill_{num_tokens}", num_tokens / prefill_s, "tokens/s")
        share = self.cost.prefill_flops(num_tokens) / prefill_s / self.limits.flops_per_s
        yield at_least(f"prefill_{num_tokens}_matrix_share", share, "of the measured rate", SHARE_OF_MATRIX_RATE)

    def _prefill_s(self, num_tokens: int, random: Random) -> float:
        self.engine.add(self._sequence(num_tokens, 1, random))
        start_s = time.perf_counter()
        while self.engine.has_work:
            self.engine.step(Unwatched())  # ends with the sampled token on the host: nothing is left to wait for
        return time.perf_counter() - start_s

    def _decode(self, batch: int, load: Load, random: Random) -> Iterator[Figure]:
        num_new = load.num_steps + 2 * batch + 8  # the first to be prefilled decode while the last are
        if batch * (load.decode_context + num_new) > self.engine.limits.kv_capacity_tokens:
            yield skipped(f"decode_{batch}", "the KV cache is too small")
            return
        sequences = [self._sequence(load.decode_context, num_new, random) for _ in range(batch)]
        for sequence in sequences:
            self.engine.add(sequence)
        while any(sequence.num_output_tokens < 2 for sequence in sequences):
            self.engine.step(Unwatched())
        step_s = statistics.median(self._step_s() for _ in range(load.num_steps))
        context = sum(sequence.num_tokens for sequence in sequences) // batch
        for sequence in sequences:
            self.engine.remove(sequence)
        yield plain(f"decode_{batch}", batch / step_s, "tokens/s")
        yield plain(f"decode_{batch}_step", step_s * 1e3, "ms")
        share = self.cost.decode_bytes(batch, context) / step_s / self.limits.read_bytes_per_s
        yield at_least(f"decode_{batch}_read_share", share, "of the measured rate", SHARE_OF_READ_BANDWIDTH)

    def _step_s(self) -> float:
        synchronize(self.engine.device)
        start_s = time.perf_counter()
        self.engine.step(Unwatched())
        return time.perf_counter() - start_s

    def _sequence(self, num_tokens: int, max_tokens: int, random: Random) -> Sequence:
        vocabulary = range(self.engine.limits.vocab_size)
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        return Sequence(random.choices(vocabulary, k=num_tokens), sampling)
