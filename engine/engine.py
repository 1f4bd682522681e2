"""The engine: schedule → build → forward → sample → commit. `step` is the only loop body in the project."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import ceil
from typing import Protocol

import torch
from torch import Tensor

from common.block_hash import BlockHash
from common.errors import InvalidRequest, PromptTooLong
from common.kv_layout import KVLayout
from common.sampling import FinishReason, SamplingParams
from engine.batch import build_batch
from engine.block_manager import CacheEvents, slot_mapping
from engine.download import Download
from engine.forward import Forward
from engine.kv_cache import KVCache
from engine.pace import Pace
from engine.sampler import Sampler
from engine.scheduler import Scheduler
from engine.sequence import SampledToken, ScheduledSequence, Sequence
from engine.upload import upload

WARM_UP_STREAMS = 16

# Called with a layer's index: K and V of the scheduled tokens are in the cache for it, and will not change.
OnLayerComputed = Callable[[int], None]


class StepObserver(Protocol):
    """What a worker watches of each step, on the engine's thread. KV transfer hangs on it."""

    def on_scheduled(self, scheduled: Seq[ScheduledSequence]) -> OnLayerComputed | None:
        """The step's work is chosen and about to run. Who returns a function is told of each layer; the others save
        the engine the time to stop after each."""

    def on_sampled(self, sampled: Seq[SampledToken]) -> None:
        """The step's tokens; finished sequences are already gone, and others may be removed from here."""


@dataclass(frozen=True)
class EngineLimits:
    """What the router must know to refuse a request that could never run."""

    vocab_size: int
    max_model_len: int  # tokens, prompt and answer together
    max_num_seqs: int
    kv_capacity_tokens: int
    block_size: int  # tokens in one block of the prefix cache

    def require_valid(self, sequence: Sequence) -> None:
        """The router checks this too; an engine trusts nobody with its memory.

        Raises: InvalidRequest, PromptTooLong.
        """
        if not sequence.token_ids:
            raise InvalidRequest("the prompt is empty")
        if sequence.num_tokens + sequence.sampling.max_tokens > self.max_model_len:
            raise PromptTooLong(
                f"{sequence.num_tokens} prompt tokens and {sequence.sampling.max_tokens} new ones are more than this "
                f"model's {self.max_model_len}"
            )
        for token_id in (min(sequence.token_ids), max(sequence.token_ids)):
            if not 0 <= token_id < self.vocab_size:
                raise InvalidRequest(f"token ids go from 0 to {self.vocab_size - 1}; the prompt has {token_id}")


@dataclass(frozen=True)
class EngineLoad:
    num_waiting: int
    num_running: int
    num_reserved: int
    uncached_tokens: int  # prompt tokens still to compute
    free_blocks: int
    total_blocks: int
    prefill_s_per_token: float  # of prompts that have the engine for themselves; 0: not known yet
    decode_step_s: float  # at the number of sequences that decode now, without prompts beside them; 0: not known yet


class Engine:
    """One model behind `forward`, one KV cache, one scheduler. Not thread-safe: it lives on engine/loop.py's thread."""

    def __init__(
        self,
        forward: Forward,
        kv_cache: KVCache,
        scheduler: Scheduler,
        sampler: Sampler,
        description: EngineDescription,
        pace: Pace,
    ) -> None:
        self._forward = forward
        self._kv_cache = kv_cache
        self._scheduler = scheduler
        self._eos_token_ids = frozenset(description.eos_token_ids)
        self.layout = description.layout
        self.limits = description.limits
        self.sampler = sampler
        self._pace = pace
        scheduler.prompt_budget = pace.prompt_budget
        self.device = kv_cache.device
        self.num_steps = 0

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Before there is any sequence: what is done but once is done, and the first request finds the pace known.

        The blocks that this writes to are nobody's yet.
        """
        num_blocks, block_size = self._kv_cache.shape.num_blocks, self._kv_cache.shape.block_size
        most = min(self._pace.max_num_batched_tokens, self.limits.max_model_len, num_blocks * block_size)
        num_streams = min(WARM_UP_STREAMS, most, num_blocks)
        short, long = [max(2, most // 4)], [max(2, most)]
        self._warm_up_step(short)
        for prompts in (short, long):
            self._pace.observe(sum(prompts), 0, self._warm_up_step(prompts))
        for streams in ([1], [1] * num_streams):
            self._pace.observe(0, len(streams), self._warm_up_step(streams))
        self._kv_cache.populate()

    def _warm_up_step(self, lengths: list[int]) -> float:
        """How long a step takes, in seconds, with sequences of these lengths, all computed."""
        start_s = time.perf_counter()
        block_size, first_block = self._kv_cache.shape.block_size, 0
        parts: list[ScheduledSequence] = []
        for length in lengths:
            sequence = Sequence([0] * length, SamplingParams(max_tokens=1, temperature=0.0))
            end_block = first_block + ceil(length / block_size)
            sequence.block_table = list(range(first_block, end_block))
            parts.append(ScheduledSequence(sequence, 0, length))
            first_block = end_block
        batch = build_batch(parts, block_size, self._kv_cache.device)
        self._sample(self._forward(batch, None), parts).tolist()
        return time.perf_counter() - start_s

    # ---------------------------------------------------------------- sequences in

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence whose prompt this engine computes itself."""
        self._scheduler.add(sequence)

    def reserve(self, sequence: Sequence) -> int:
        """Hold blocks for a sequence whose prompt's KV comes by `write_kv`, all but the first tokens that this cache
        has: how many those are. Raises: NoFreeBlocks."""
        self._scheduler.reserve(sequence)
        return sequence.num_computed_tokens

    def write_kv(
        self, sequence: Sequence, layer_start: int, token_start: int, data: Tensor, head_start: int = 0
    ) -> None:
        """Scatter KV [layers, 2, tokens, kv_heads, head_dim] into a reserved sequence's own blocks.

        Ignored once the sequence is no longer reserved: its blocks may already be another's.
        """
        if sequence in self._scheduler.reserved:
            slots = self._slots(sequence, token_start, token_start + data.shape[2])
            self._kv_cache.write_slots(layer_start, slots, data.to(self._kv_cache.device), head_start)

    def activate(self, sequence: Sequence, first_token: int) -> None:
        """The prompt's KV is complete: go on decoding from `first_token`. Ignored if the sequence is gone."""
        if sequence in self._scheduler.reserved:
            sequence.num_computed_tokens = sequence.num_tokens
            sequence.token_ids.append(first_token)
            self._scheduler.activate(sequence)

    def read_kv(self, sequence: Sequence, layers: tuple[int, int], tokens: tuple[int, int]) -> Tensor:
        """A fresh copy of computed KV: [layers, 2, tokens, kv_heads, head_dim]."""
        return self._kv_cache.read_slots(*layers, self._slots(sequence, *tokens))

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence in any state and free its blocks. Safe to call again."""
        self._scheduler.remove(sequence)

    def hold_back(self, is_held_back: Callable[[Sequence], bool]) -> None:
        """A prompt goes on only in steps that find it not held back. Wake the loop when the answer may have changed."""
        self._scheduler.is_held_back = is_held_back

    # ---------------------------------------------------------------- the step

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @torch.inference_mode()
    def step(self, observer: StepObserver) -> bool:
        """Compute one batch: decode tokens and prefill chunks together. False: nothing can run before a command
        changes that, because reservations hold the blocks, or all prompts are held back."""
        start_s = time.perf_counter()
        scheduled = self._scheduler.schedule()
        if not scheduled:
            return False
        on_layer_computed = observer.on_scheduled(scheduled)
        batch = build_batch(scheduled, self._kv_cache.shape.block_size, self._kv_cache.device)
        logits = self._forward(batch, on_layer_computed)
        tokens = self._sample(logits, scheduled)
        self._advance(scheduled)  # while the tokens are on their way from the device
        self.num_steps += 1
        sampled = self._commit(scheduled, tokens.tolist())
        self._note_pace(scheduled, time.perf_counter() - start_s)
        observer.on_sampled(sampled)
        return True

    def _note_pace(self, scheduled: Seq[ScheduledSequence], seconds: float) -> None:
        num_tokens = sum(part.num_scheduled_tokens for part in scheduled)
        num_decodes = sum(part.num_scheduled_tokens == 1 for part in scheduled)
        self._pace.observe(num_tokens - num_decodes, num_decodes, seconds)

    def _sample(self, logits: Tensor, scheduled: Seq[ScheduledSequence]) -> Download:
        sequences = [part.sequence for part in scheduled if part.is_sampled]
        return Download(self.sampler(logits, [s.sampling for s in sequences], [s.num_tokens for s in sequences]))

    def _advance(self, scheduled: Seq[ScheduledSequence]) -> None:
        """Take note of what the step computes, as far as its tokens do not matter."""
        for part in scheduled:
            part.sequence.num_computed_tokens = part.end
            self._scheduler.publish(part.sequence, part.start)

    def _commit(self, scheduled: Seq[ScheduledSequence], tokens: list[int]) -> list[SampledToken]:
        sampled: list[SampledToken] = []
        sequences = [part.sequence for part in scheduled if part.is_sampled]
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.token_ids.append(token)
            finish_reason = self._finish_reason(sequence, token)
            if finish_reason is not None:
                self._scheduler.remove(sequence)
            sampled.append(SampledToken(sequence, token, finish_reason))
        return sampled

    def _finish_reason(self, sequence: Sequence, token: int) -> FinishReason | None:
        sampling = sequence.sampling
        if token in sampling.stop_token_ids or (token in self._eos_token_ids and not sampling.ignore_eos):
            return FinishReason.STOP
        if sequence.num_output_tokens >= sampling.max_tokens or sequence.num_tokens >= self.limits.max_model_len:
            return FinishReason.LENGTH
        return None

    # ---------------------------------------------------------------- what others may know

    def load(self) -> EngineLoad:
        scheduler = self._scheduler
        num_decodes = sum(s.num_uncomputed_tokens == 1 for s in scheduler.running)
        pending = (*scheduler.waiting, *scheduler.activated, *scheduler.running)
        return EngineLoad(
            num_waiting=len(scheduler.waiting) + len(scheduler.activated),
            num_running=len(scheduler.running),
            num_reserved=len(scheduler.reserved),
            uncached_tokens=sum(s.num_uncomputed_tokens for s in pending if s.num_uncomputed_tokens > 1),
            free_blocks=scheduler.blocks.num_free,
            total_blocks=scheduler.blocks.num_blocks,
            prefill_s_per_token=self._pace.prefill_s_per_token(),
            decode_step_s=self._pace.decode_step_s(max(1, num_decodes)),
        )

    def counters(self) -> dict[str, int]:
        """Monotonic, by the names that docs/architecture.md lists. May be read from any thread."""
        return {
            "engine_steps": self.num_steps,
            "preemptions": self._scheduler.num_preemptions,
            "prefix_prompt_tokens": self._scheduler.num_prompt_tokens,
            "prefix_hit_tokens": self._scheduler.num_cached_tokens,
            "prefix_evicted_blocks": self._scheduler.blocks.num_evictions,
        }

    def drain_cache_events(self) -> CacheEvents:
        """What the prefix cache gained and lost since the last call."""
        return self._scheduler.blocks.drain_events()

    def cached_hashes(self) -> list[BlockHash]:
        """All that the prefix cache holds now."""
        return self._scheduler.blocks.cached_hashes()

    def _slots(self, sequence: Sequence, start: int, end: int) -> Tensor:
        slots = slot_mapping(sequence.block_table, start, end, self._kv_cache.shape.block_size)
        return upload(slots, torch.int64, self._kv_cache.device)


@dataclass(frozen=True)
class EngineDescription:
    """What the engine says of itself to routers and peers, fixed at load."""

    layout: KVLayout
    limits: EngineLimits
    eos_token_ids: tuple[int, ...]
