"""The walkthrough's statements (a) to (g) on the real engine: its decoder over the paged cache, with random weights."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from common.kv_layout import KVLayout
from common.sampling import SamplingParams
from engine.attention.torch_reference import TorchReferenceAttention
from engine.batch import build_batch
from engine.block_manager import BlockManager, slot_mapping
from engine.engine import Engine, EngineDescription, EngineLimits
from engine.forward import EagerForward
from engine.kv_cache import KVCache, KVCacheShape
from engine.model.config import ModelConfig, RopeConfig
from engine.model.decoder import Decoder
from engine.pace import Pace
from engine.sampler import sample
from engine.scheduler import Scheduler
from engine.sequence import SampledToken, ScheduledSequence, Sequence

CPU = torch.device("cpu")
CONFIG = ModelConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=10_000.0),
    tie_word_embeddings=False,
    attention_bias=True,
    attention_output_bias=False,
    max_position_embeddings=1024,
    eos_token_ids=(),
)
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def model() -> Decoder:
    llama = Decoder(CONFIG, torch.float32, CPU)
    generator = torch.Generator().manual_seed(7)
    for parameter in llama.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return llama


@dataclass
class Worker:
    """A model with a paged cache of its own: its own block size, its own block ids."""

    model: Decoder
    kv_cache: KVCache

    @staticmethod
    def new(model: Decoder, block_size: int = 4, num_blocks: int = 256) -> Worker:
        shape = KVCacheShape(CONFIG.num_layers, num_blocks, block_size, CONFIG.num_kv_heads, CONFIG.head_dim)
        return Worker(model, KVCache(shape, torch.float32, CPU))

    def compute(self, *parts: tuple[Sequence, int], attention: AttentionSpy | None = None) -> Tensor:
        """One step over the next `count` tokens of each sequence: logits [sequences, vocab]."""
        scheduled = [ScheduledSequence(sequence, sequence.num_computed_tokens, count) for sequence, count in parts]
        batch = build_batch(scheduled, self.kv_cache.shape.block_size, CPU)
        for part in scheduled:
            part.sequence.num_computed_tokens = part.end
        return self.model(batch, self.kv_cache, attention or TorchReferenceAttention())

    def kv(self, sequence: Sequence) -> Tensor:
        return self.kv_cache.read_slots(0, CONFIG.num_layers, self.slots(sequence))

    def slots(self, sequence: Sequence) -> Tensor:
        block_size = self.kv_cache.shape.block_size
        return torch.tensor(slot_mapping(sequence.block_table, 0, sequence.num_computed_tokens, block_size))


class AttentionSpy(TorchReferenceAttention):
    """The real attention, remembering each layer's output."""

    def __init__(self) -> None:
        self.outputs: list[Tensor] = []

    def __call__(self, *args, **kwargs) -> Tensor:
        self.outputs.append(super().__call__(*args, **kwargs))
        return self.outputs[-1]


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(CONFIG.vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def sequence_of(token_ids: list[int], blocks: Seq[int]) -> Sequence:
    return Sequence(list(token_ids), GREEDY, block_table=list(blocks))


def close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-4, atol=1e-5)


def test_a_token_by_token_prefill_gives_the_same_cache_and_logits(model: Decoder) -> None:
    worker, prompt = Worker.new(model), tokens(11)
    at_once, one_by_one = sequence_of(prompt, (5, 0, 9)), sequence_of(prompt, (3, 8, 1))
    parallel = worker.compute((at_once, 11))
    for _ in prompt:
        serial = worker.compute((one_by_one, 1))
    assert close(parallel, serial)
    assert close(worker.kv(at_once), worker.kv(one_by_one))


def test_b_the_cache_is_k_and_v_per_layer(model: Decoder) -> None:
    worker, sequence = Worker.new(model), sequence_of(tokens(3), (2,))
    worker.compute((sequence, 3))
    kv = worker.kv(sequence)
    assert kv.shape == (CONFIG.num_layers, 2, 3, CONFIG.num_kv_heads, CONFIG.head_dim)
    assert not close(kv[0], kv[1])
    assert worker.kv_cache.shape.num_elements_per_block == kv[:, :, :1].numel() * worker.kv_cache.shape.block_size


def test_c_one_row_of_logits_but_every_rows_k_and_v(model: Decoder) -> None:
    worker, prompt = Worker.new(model), tokens(6)
    sequence = sequence_of(prompt, (2, 4))
    assert worker.compute((sequence, 5)).shape == (0, CONFIG.vocab_size)  # a chunk before the last needs no logits
    assert worker.compute((sequence, 1)).shape == (1, CONFIG.vocab_size)
    sequence.token_ids.append(1)
    whole = worker.compute((sequence, 1))

    other = sequence_of(prompt, (6, 7))
    worker.compute((other, 6))
    first_slot = worker.slots(other)[:1]
    worker.kv_cache.write_slots(0, first_slot, torch.zeros_like(worker.kv_cache.read_slots(0, 2, first_slot)))
    other.token_ids.append(1)
    assert not close(worker.compute((other, 1)), whole)


def test_d_a_decode_step_is_the_last_row_of_the_whole(model: Decoder) -> None:
    worker, prompt = Worker.new(model), tokens(3)
    whole, decode = AttentionSpy(), AttentionSpy()
    logits = worker.compute((sequence_of(prompt, (1,)), 3), attention=whole)
    sequence = sequence_of(prompt, (2,))
    worker.compute((sequence, 2))
    decoded = worker.compute((sequence, 1), attention=decode)
    assert len(whole.outputs) == len(decode.outputs) == CONFIG.num_layers
    for full, row in zip(whole.outputs, decode.outputs, strict=True):
        assert close(full[-1:], row)
    assert close(logits, decoded)


def test_e_new_tokens_do_not_see_later_new_tokens(model: Decoder) -> None:
    worker, prompt = Worker.new(model), tokens(9)
    whole, chunk, changed = (
        sequence_of(prompt, (1, 2, 3)),
        sequence_of(prompt, (4, 5, 6)),
        sequence_of(prompt, (7, 8, 9)),
    )
    logits = worker.compute((whole, 9))
    worker.compute((chunk, 5))
    assert close(worker.compute((chunk, 4)), logits)

    changed.token_ids[-1] = (prompt[-1] + 1) % CONFIG.vocab_size
    worker.compute((changed, 5))
    assert not close(worker.compute((changed, 4)), logits)
    assert torch.equal(worker.kv(changed)[:, :, :8], worker.kv(chunk)[:, :, :8])


def test_f_a_mixed_step_is_one_batch_of_102_rows_and_equals_three_steps_apart(model: Decoder) -> None:
    worker = Worker.new(model)
    prompts = [tokens(501, seed=1), tokens(201, seed=2), tokens(100, seed=3)]
    tables = [range(126), range(126, 177), range(177, 202)]
    counts = (1, 1, 100)

    def cached() -> list[Sequence]:
        sequences = [sequence_of(prompt, table) for prompt, table in zip(prompts, tables, strict=True)]
        for sequence, count in zip(sequences, counts, strict=True):
            if sequence.num_tokens > count:
                worker.compute((sequence, sequence.num_tokens - count))
        return sequences

    spy = AttentionSpy()
    together = worker.compute(*zip(cached(), counts, strict=True), attention=spy)
    assert [output.shape[0] for output in spy.outputs] == [102, 102]
    mixed_kv = [worker.kv(s) for s in _finished(prompts, tables)]
    apart = torch.cat([worker.compute((sequence, count)) for sequence, count in zip(cached(), counts, strict=True)])
    assert close(together, apart)
    for mixed, alone in zip(mixed_kv, [worker.kv(s) for s in _finished(prompts, tables)], strict=True):
        assert close(mixed, alone)


def _finished(prompts: list[list[int]], tables: list[range]) -> list[Sequence]:
    sequences = [sequence_of(prompt, table) for prompt, table in zip(prompts, tables, strict=True)]
    for sequence in sequences:
        sequence.num_computed_tokens = sequence.num_tokens
    return sequences


def test_g_the_cache_moves_to_another_worker_with_other_blocks(model: Decoder) -> None:
    here, there = Worker.new(model, block_size=4), Worker.new(model, block_size=7)
    stayed, moved = sequence_of(tokens(10), (9, 2, 5, 0)), sequence_of(tokens(10), (3, 1))
    here.compute((stayed, 10))
    moved.num_computed_tokens = 10
    there.kv_cache.write_slots(0, there.slots(moved), here.kv(stayed))
    assert torch.equal(here.kv(stayed), there.kv(moved))
    for token in (4, 8, 15):
        stayed.token_ids.append(token)
        moved.token_ids.append(token)
        assert torch.equal(here.compute((stayed, 1)), there.compute((moved, 1)))


class StepRecorder:
    """Sees each step of an engine."""

    def __init__(self) -> None:
        self.parts: list[list[tuple[int, int]]] = []  # per step: (cached, new) tokens of each sequence
        self.sampled: list[SampledToken] = []

    def on_scheduled(self, scheduled: Seq[ScheduledSequence]) -> None:
        self.parts.append([(part.start, part.num_scheduled_tokens) for part in scheduled])

    def on_sampled(self, sampled: Seq[SampledToken]) -> None:
        self.sampled += sampled


def new_engine(model: Decoder, block_size: int) -> Engine:
    worker = Worker.new(model, block_size)
    shape = worker.kv_cache.shape
    capacity = shape.num_blocks * block_size
    layout = KVLayout("walkthrough", shape.num_layers, shape.num_kv_heads, shape.head_dim, "float32", "theta=10000")
    limits = EngineLimits(CONFIG.vocab_size, 1024, 8, capacity, block_size)
    scheduler = Scheduler(BlockManager(shape.num_blocks, block_size), max_num_batched_tokens=1024, max_num_seqs=8)
    forward = EagerForward(model, worker.kv_cache, TorchReferenceAttention())
    description = EngineDescription(layout, limits, eos_token_ids=())
    return Engine(forward, worker.kv_cache, scheduler, sample, description, Pace(1024))


def run_to_end(engine: Engine, recorder: StepRecorder) -> None:
    for _ in range(50):
        if not engine.has_work:
            return
        engine.step(recorder)
    raise AssertionError("the engine still has work after 50 steps")


def answer_alone(model: Decoder, prompt: list[int]) -> list[int]:
    engine, sequence = new_engine(model, block_size=4), Sequence(list(prompt), GREEDY)
    engine.add(sequence)
    run_to_end(engine, StepRecorder())
    return sequence.token_ids[len(prompt) :]


def test_f_the_engine_runs_the_mixed_step_and_every_answer_is_as_if_alone(model: Decoder) -> None:
    prompts = [tokens(500, seed=1), tokens(200, seed=2), tokens(100, seed=3)]
    engine, recorder = new_engine(model, block_size=4), StepRecorder()
    sequences = [Sequence(list(prompt), GREEDY) for prompt in prompts]
    engine.add(sequences[0])
    engine.add(sequences[1])
    engine.step(recorder)
    engine.add(sequences[2])
    engine.step(recorder)
    assert recorder.parts == [[(0, 500), (0, 200)], [(500, 1), (200, 1), (0, 100)]]
    run_to_end(engine, recorder)
    for sequence, prompt in zip(sequences, prompts, strict=True):
        assert sequence.token_ids[len(prompt) :] == answer_alone(model, prompt)


def test_g_the_engine_goes_on_from_another_engines_cache(model: Decoder) -> None:
    prompt = tokens(21)
    prefill, decode = new_engine(model, block_size=4), new_engine(model, block_size=16)
    computed = Sequence(list(prompt), GREEDY)
    prefill.add(computed)
    recorder = StepRecorder()
    prefill.step(recorder)
    first_token = recorder.sampled[0].token_id

    received = Sequence(list(prompt), GREEDY)
    decode.reserve(received)
    decode.write_kv(received, 0, 0, prefill.read_kv(computed, (0, CONFIG.num_layers), (0, len(prompt))))
    decode.activate(received, first_token)
    run_to_end(decode, StepRecorder())
    assert received.token_ids[len(prompt) :] == answer_alone(model, prompt)
