"""A model whose KV and tokens anybody can recompute: so that a test can say of every slot what must be in it.

Both are functions of a token and its position. Everything around it is real: scheduler, block manager, KV pool.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from common.kv_layout import KVLayout
from common.sampling import SamplingParams
from engine.batch import Batch
from engine.block_manager import BlockManager
from engine.engine import Engine, EngineDescription, EngineLimits, OnLayerComputed, StepObserver
from engine.kv_cache import KVCache, KVCacheShape
from engine.pace import Pace
from engine.sampler import sample
from engine.scheduler import Scheduler
from engine.sequence import SampledToken, ScheduledSequence, Sequence

VOCAB_SIZE = 1024
MAX_MODEL_LEN = 256
LAYOUT = KVLayout("truth", num_layers=4, num_kv_heads=2, head_dim=32, dtype="float32", rope="none")
GREEDY = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
CPU = torch.device("cpu")


def true_kv(token_ids: Tensor, positions: Tensor) -> Tensor:
    """[layers, 2, tokens, heads, head_dim] float32, exact: no two places of a prompt hold the same number by design."""
    shape = (LAYOUT.num_layers, 2, 1, LAYOUT.num_kv_heads, LAYOUT.head_dim)
    places = torch.arange(LAYOUT.num_layers * 2 * LAYOUT.num_kv_heads * LAYOUT.head_dim).view(shape)
    tokens = (token_ids * 40503 + positions * 7919 + 1).view(1, 1, -1, 1, 1)
    mixed = (tokens * 2654435761 + places * 805459861) & 0xFFFFFFFF
    return (((mixed ^ (mixed >> 15)) * 69069) & 0xFFFFFF).to(torch.float32)


def true_token(token_id: int, position: int) -> int:
    """What follows this token."""
    return (token_id * 31 + position * 17 + 7) % VOCAB_SIZE


def true_answer(prompt: Seq[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(true_token(tokens[-1], len(tokens) - 1))
    return tokens[len(prompt) :]


@dataclass(frozen=True)
class TrueForward:
    kv_cache: KVCache

    def __call__(self, batch: Batch, on_layer_computed: Callable[[int], None] | None) -> Tensor:
        data = true_kv(batch.token_ids, batch.positions)
        for layer in range(LAYOUT.num_layers):
            self.kv_cache.write(layer, data[layer, 0], data[layer, 1], batch.slot_mapping)
            if on_layer_computed is not None:
                on_layer_computed(layer)
        rows = batch.logits_indices.tolist()
        logits = torch.zeros(len(rows), VOCAB_SIZE)
        for row, index in enumerate(rows):
            logits[row, true_token(int(batch.token_ids[index]), int(batch.positions[index]))] = 1.0
        return logits


@dataclass
class TruthCheck:
    """A StepObserver on the engine's thread: whatever KV a sequence has when it joins a batch must be the truth."""

    engine: Engine
    inner: StepObserver | None = None
    wrong: list[str] = field(default_factory=list)

    def on_scheduled(self, scheduled: Seq[ScheduledSequence]) -> OnLayerComputed | None:
        for part in scheduled:
            self._check(part)
        return None if self.inner is None else self.inner.on_scheduled(scheduled)

    def on_sampled(self, sampled: Seq[SampledToken]) -> None:
        if self.inner is not None:
            self.inner.on_sampled(sampled)

    def _check(self, part: ScheduledSequence) -> None:
        if part.start == 0:
            return
        held = self.engine.read_kv(part.sequence, (0, LAYOUT.num_layers), (0, part.start))
        truth = true_kv(torch.tensor(part.sequence.token_ids[: part.start]), torch.arange(part.start))
        if not torch.equal(held, truth):
            tokens = (held != truth).flatten(3).any(3).any(0).any(0).nonzero().flatten().tolist()
            self.wrong.append(f"tokens {tokens} of {part.start} of {part.sequence.token_ids}")


@dataclass(frozen=True)
class TrueEngine:
    engine: Engine
    blocks: BlockManager

    @property
    def leaks(self) -> list[str]:
        """Ask when nothing runs."""
        load = self.engine.load()
        held = load.num_reserved + load.num_running + load.num_waiting
        used = load.total_blocks - load.free_blocks
        return [f"{held} sequences hold {used} of {load.total_blocks} blocks"] if held or used else []


def new_true_engine(num_blocks: int, block_size: int, max_num_batched_tokens: int) -> TrueEngine:
    shape = KVCacheShape(LAYOUT.num_layers, num_blocks, block_size, LAYOUT.num_kv_heads, LAYOUT.head_dim)
    kv_cache = KVCache(shape, torch.float32, CPU)
    blocks = BlockManager(num_blocks, block_size)
    scheduler = Scheduler(blocks, max_num_batched_tokens, max_num_seqs=64)
    limits = EngineLimits(
        VOCAB_SIZE, MAX_MODEL_LEN, max_num_seqs=64, kv_capacity_tokens=num_blocks * block_size, block_size=block_size
    )
    engine = Engine(
        TrueForward(kv_cache),
        kv_cache,
        scheduler,
        sample,
        EngineDescription(LAYOUT, limits, ()),
        Pace(max_num_batched_tokens),
    )
    return TrueEngine(engine, blocks)


def new_sequence(prompt: list[int]) -> Sequence:
    return Sequence(list(prompt), GREEDY)
