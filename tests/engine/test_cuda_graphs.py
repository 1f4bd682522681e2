"""Which steps are replayed, what a replay reads and writes. A device's part is played by a capture that runs again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor

from common.engine_config import EngineConfig
from common.sampling import SamplingParams
from engine.attention.base import AttentionMetadata
from engine.attention.torch_reference import TorchReferenceAttention
from engine.batch import Batch, build_batch
from engine.build import assemble_engine
from engine.cuda_graphs import DecodeGraphs, DecodeInputs, DecodeShape, graph_sizes
from engine.engine import Engine
from engine.forward import EagerForward, Forward
from engine.kv_cache import KVCache, KVCacheShape
from engine.model.weights import LoadedModel, load_model
from engine.sequence import ScheduledSequence, Sequence

CPU = torch.device("cpu")
NUM_LAYERS, NUM_BLOCKS, BLOCK_SIZE, SCRATCH = 4, 24, 4, 23
SHAPE = DecodeShape(max_num_seqs=6, max_model_len=40, block_size=BLOCK_SIZE, num_layers=4, scratch_block=SCRATCH)
BLOCK_BYTES = 4 * 2 * 4 * 2 * 8 * 4  # layers, K and V, block_size, kv heads, head_dim, float32
GREEDY = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)


class DeviceLengthsAttention:
    """The reference, told the lengths by the tensors alone, as a kernel is."""

    name = "device_lengths"

    def __call__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        query_lens = metadata.query_start_loc.diff().tolist()
        read = replace(metadata, query_lens_list=query_lens, seq_lens_list=metadata.seq_lens.tolist())
        return TorchReferenceAttention()(query, key_cache, value_cache, read, scale, window)


@dataclass
class Rerun:
    """A captured graph that computes again, into the same memory."""

    run: Callable[[], Tensor]
    output: Tensor = field(init=False)
    num_replays: int = 0

    def __post_init__(self) -> None:
        self.output = self.run().clone()

    def replay(self) -> None:
        self.output.copy_(self.run())
        self.num_replays += 1


@dataclass
class Device:
    """A model, a cache, and both ways to compute a step with them."""

    loaded: LoadedModel
    captured: list[Rerun] = field(default_factory=list)
    num_eager: int = 0

    def __post_init__(self) -> None:
        config = self.loaded.config
        shape = KVCacheShape(NUM_LAYERS, NUM_BLOCKS, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
        self.cache = KVCache(shape, torch.float32, CPU)
        self.cache.write_slots(0, torch.arange(NUM_BLOCKS * BLOCK_SIZE), torch.zeros_like(self.kv))
        self._eager = EagerForward(self.loaded.model, self.cache, DeviceLengthsAttention())
        self.graphs = DecodeGraphs(self.eager, self.capture, SHAPE, CPU)
        self.num_eager = 0  # it has warmed up

    @property
    def kv(self) -> Tensor:
        return self.cache.read_slots(0, NUM_LAYERS, torch.arange(NUM_BLOCKS * BLOCK_SIZE))

    @property
    def replays(self) -> dict[int, int]:
        """By size, without those that never ran."""
        return {graph.output.shape[0]: graph.num_replays for graph in self.captured if graph.num_replays}

    def capture(self, run: Callable[[], Tensor]) -> Rerun:
        self.captured.append(Rerun(run))
        return self.captured[-1]

    def eager(self, batch: Batch, on_layer_computed: Callable[[int], None] | None) -> Tensor:
        self.num_eager += bool(batch.attention.seq_lens_list)  # else it is a graph that runs
        return self._eager(batch, on_layer_computed)


@pytest.fixture
def device(tiny_model: Path) -> Device:
    return Device(load_model(tiny_model, torch.float32, CPU))


def prompts(*lengths: int) -> list[list[int]]:
    random = Random(sum(lengths))
    return [[random.randrange(250) for _ in range(length)] for length in lengths]


def greedy_answers(forward: Forward, todo: list[list[int]], *, num_tokens: int) -> list[list[int]]:
    """Prefill each prompt by itself, then decode together; every prompt gets one token less than the one before it."""
    free = list(range(SCRATCH))
    sequences = [Sequence(list(prompt), GREEDY) for prompt in todo]
    for sequence in sequences:
        sequence.block_table = [free.pop(0) for _ in range(-(-(len(sequence.token_ids) + num_tokens) // BLOCK_SIZE))]
        step(forward, [ScheduledSequence(sequence, 0, sequence.num_tokens)])
    for turn in range(num_tokens - 1):
        running = sequences[: max(1, len(sequences) - turn)]
        step(forward, [ScheduledSequence(sequence, sequence.num_tokens - 1, 1) for sequence in running])
    return [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in sequences]


def step(forward: Forward, scheduled: list[ScheduledSequence]) -> Tensor:
    logits = forward(build_batch(scheduled, BLOCK_SIZE, CPU), None)
    for part, token in zip([part for part in scheduled if part.is_sampled], logits.argmax(-1).tolist(), strict=True):
        part.sequence.token_ids.append(token)
    return logits


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [(1, [1]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (20, [1, 2, 4, 8, 16, 20]), (64, [1, 2, 4, *range(8, 65, 8)])],
)
def test_sizes_end_at_the_largest_batch(max_num_seqs: int, sizes: list[int]) -> None:
    assert graph_sizes(max_num_seqs) == sizes


def test_no_graph_is_larger_than_its_memory_is_worth() -> None:
    assert graph_sizes(5000)[-2:] == [480, 512]


def test_replayed_steps_give_the_tokens_of_eager_ones(device: Device) -> None:
    todo = prompts(1, 9, 4, 5, 13)
    expected = greedy_answers(device.eager, todo, num_tokens=8)
    device.num_eager = 0
    assert greedy_answers(device.graphs, todo, num_tokens=8) == expected
    assert device.num_eager == 4  # the prefills; a prompt of one token is a decode step to a graph
    assert device.replays == {1: 4, 2: 1, 4: 2, 6: 1}


def test_padding_writes_to_the_scratch_block_only(device: Device) -> None:
    sequences = [Sequence(list(prompt), GREEDY) for prompt in prompts(3, 6, 9)]
    for sequence, table in zip(sequences, ([0, 1], [2, 3], [4, 5, 6]), strict=True):
        sequence.block_table = table
        step(device.graphs, [ScheduledSequence(sequence, 0, sequence.num_tokens)])
    before = device.kv
    scheduled = [ScheduledSequence(sequence, sequence.num_tokens - 1, 1) for sequence in sequences]
    written = set(build_batch(scheduled, BLOCK_SIZE, CPU).slot_mapping.tolist())
    step(device.graphs, scheduled)
    assert device.replays == {4: 1}
    changed = (device.kv != before).flatten(3).any(-1).any(0).any(0).nonzero().flatten().tolist()
    in_scratch = set(range(SCRATCH * BLOCK_SIZE, NUM_BLOCKS * BLOCK_SIZE))
    assert set(changed) - in_scratch == written


def test_a_smaller_step_after_a_larger_one_leaves_the_others_alone(device: Device) -> None:
    """Rows of the larger step would write again where they wrote then, unless they are made padding."""
    sequences = [Sequence(list(prompt), GREEDY) for prompt in prompts(2, 2, 2, 2, 2)]
    for index, sequence in enumerate(sequences):
        sequence.block_table = [index]
        step(device.graphs, [ScheduledSequence(sequence, 0, 2)])
    step(device.graphs, [ScheduledSequence(sequence, 2, 1) for sequence in sequences])
    before = device.kv
    step(device.graphs, [ScheduledSequence(sequence, 3, 1) for sequence in sequences[:3]])
    untouched = torch.arange(3 * BLOCK_SIZE, 5 * BLOCK_SIZE)
    assert torch.equal(device.kv[:, :, untouched], before[:, :, untouched])


def test_a_step_that_is_not_all_decodes_or_too_large_runs_eagerly(device: Device) -> None:
    sequences = [Sequence(list(prompt), GREEDY) for prompt in prompts(*[3] * 7)]
    for index, sequence in enumerate(sequences):
        sequence.block_table = [index]
        step(device.graphs, [ScheduledSequence(sequence, 0, 3)])
    assert (device.num_eager, device.replays) == (7, {})
    step(device.graphs, [ScheduledSequence(sequence, 3, 1) for sequence in sequences])
    assert (device.num_eager, device.replays) == (8, {})
    fresh = Sequence([1, 2], GREEDY, block_table=[10])
    mixed = [ScheduledSequence(sequences[0], 4, 1), ScheduledSequence(fresh, 0, 2)]
    sequences[0].block_table.append(8)
    step(device.graphs, mixed)
    assert (device.num_eager, device.replays) == (9, {})


def test_a_one_token_chunk_of_a_longer_prompt_gives_no_logits(device: Device) -> None:
    done, chunked = Sequence([7], GREEDY, block_table=[0]), Sequence([5, 6, 7], GREEDY, block_table=[1])
    batch = build_batch([ScheduledSequence(chunked, 0, 1), ScheduledSequence(done, 0, 1)], BLOCK_SIZE, CPU)
    assert batch.logits_indices.tolist() == [1]
    torch.testing.assert_close(device.graphs(batch, None), device.eager(batch, None))
    assert device.replays == {2: 1}


def test_every_layer_is_announced_after_a_replay(device: Device) -> None:
    layers: list[int] = []
    device.graphs(build_batch([ScheduledSequence(Sequence([7], GREEDY, block_table=[0]), 0, 1)], 4, CPU), layers.append)
    assert layers == [0, 1, 2, 3]


def test_a_block_table_longer_than_any_sequence_may_get_is_cut() -> None:
    """The scheduler holds a block for the token after the last one."""
    inputs = DecodeInputs(2, SHAPE, CPU)
    table = list(range(SHAPE.max_num_blocks + 1))
    batch = build_batch([ScheduledSequence(Sequence([3] * 40, GREEDY, block_table=table), 39, 1)], BLOCK_SIZE, CPU)
    inputs.fill(batch, 2)
    filled = inputs.batch(2)
    assert filled.attention.block_table.tolist() == [table[:-1], [SCRATCH, *[0] * (SHAPE.max_num_blocks - 1)]]
    assert filled.attention.seq_lens.tolist() == [40, 1]
    assert filled.slot_mapping.tolist() == [39, SCRATCH * BLOCK_SIZE]


def test_an_engine_with_graphs_answers_as_one_without_and_keeps_a_block_for_itself(tiny_model: Path) -> None:
    """Every part but the device: the scheduler, the sampler, our own kernel, a prefix that is shared."""
    loaded = load_model(tiny_model, torch.float32, CPU)
    config = EngineConfig(
        tiny_model, "float32", "cpu", "triton", block_size=4, kv_cache_bytes=40 * BLOCK_BYTES, max_num_seqs=3
    )
    graphs: list[Rerun] = []

    def capture(run: Callable[[], Tensor]) -> Rerun:
        graphs.append(Rerun(run))
        return graphs[-1]

    engine = assemble_engine(loaded, config, CPU, capture)
    plain = assemble_engine(loaded, replace(config, attention="cpu"), CPU, capture)
    assert (engine.load().total_blocks, plain.load().total_blocks) == (39, 40)
    todo = [*prompts(1, 9, 6, 13), [7] * 9, [7] * 9]
    assert engine_answers(engine, todo) == engine_answers(plain, todo)
    assert (
        sum(graph.num_replays for graph in graphs) == 10
    )  # six answers, three at a time, five steps after the prefill's
    assert engine.load().free_blocks == 39


def engine_answers(engine: Engine, todo: list[list[int]]) -> list[list[int]]:
    sampling = [replace(GREEDY, max_tokens=6, temperature=0.5 * (index % 2)) for index in range(len(todo))]
    sequences = [Sequence(list(prompt), wanted) for prompt, wanted in zip(todo, sampling, strict=True)]
    for sequence in sequences:
        engine.add(sequence)
    while engine.has_work:
        engine.step(Unwatched())
    return [sequence.token_ids for sequence in sequences]


class Unwatched:
    def on_scheduled(self, scheduled: object) -> None: ...

    def on_sampled(self, sampled: object) -> None: ...
