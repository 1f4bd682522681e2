"""A whole step in three calls: the bits of its operations one by one, whatever was computed before or beside it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from common.sampling import SamplingParams
from engine.batch import Batch, build_batch
from engine.kv_cache import KVCache, KVCacheShape
from engine.model.config import ModelConfig, RopeConfig
from engine.model.decoder import Decoder, Layer
from engine.model.layers import Linear
from engine.native.attention import angle_table
from engine.native.forward import NativeForward
from engine.native.kernels import NativeKernels
from engine.native.packing import PackedLinear, WeightFormat
from engine.sequence import ScheduledSequence, Sequence

CPU, DTYPE = torch.device("cpu"), torch.bfloat16
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_LAYERS, VOCAB_SIZE = 6, 2, 32, 4, 2, 50
SLOTS = torch.arange(64 * BLOCK_SIZE)
MIXED = ((0, 40, 41), (1, 8, 9), (2, 0, 30), (3, 15, 22))  # decodes, a prompt, a chunk
PLAIN = ModelConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=96,
    intermediate_size=130,
    num_layers=NUM_LAYERS,
    num_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=10000.0),
    tie_word_embeddings=False,
    attention_bias=False,
    attention_output_bias=False,
    max_position_embeddings=64,
    eos_token_ids=(),
)
CONFIGS = {
    "plain": PLAIN,
    "biases": replace(PLAIN, attention_bias=True, attention_output_bias=True),
    "window": replace(PLAIN, windows=(None, 7)),
    "head norms": replace(PLAIN, qk_norm=True),
    "tied head": replace(PLAIN, tie_word_embeddings=True),
}


@pytest.fixture(params=CONFIGS)
def config(request: pytest.FixtureRequest) -> ModelConfig:
    return CONFIGS[request.param]


def torch_model(config: ModelConfig) -> Decoder:
    model = Decoder(config, DTYPE, CPU)
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


@dataclass(frozen=True)
class Work:
    """A step, and what the cache holds before it."""

    batch: Batch
    kv: Tensor

    def run(self, native: Native) -> tuple[Tensor, Tensor]:
        """Logits of every row, and what the cache holds afterwards."""
        native.kv_cache.write_slots(0, SLOTS, self.kv)
        logits = native.forward(self.batch, None).clone()
        return logits, native.kv_cache.read_slots(0, NUM_LAYERS, SLOTS)


class Native:
    def __init__(
        self, config: ModelConfig, kernels: NativeKernels, weights: WeightFormat = WeightFormat.BFLOAT16
    ) -> None:
        self.kv_cache = empty_cache()
        model = torch_model(config)
        self.forward = NativeForward(model, kernels, self.kv_cache, angle_table(model.rotary, 64), weights)


def empty_cache() -> KVCache:
    return KVCache(KVCacheShape(NUM_LAYERS, 64, BLOCK_SIZE, KV_HEADS, HEAD_DIM), DTYPE, CPU)


def work(parts: Seq[tuple[int, int, int]]) -> Work:
    """parts: (which sequence, first token, end); a sequence's numbers do not depend on what else there is.

    The cache holds the tokens before each part, and NaN elsewhere.
    """
    held = torch.full((NUM_LAYERS, 2, len(SLOTS), KV_HEADS, HEAD_DIM), torch.nan, dtype=DTYPE)
    scheduled = []
    for which, start, end in parts:
        generator = torch.Generator().manual_seed(which)
        tokens = torch.randint(VOCAB_SIZE, (64,), generator=generator).tolist()
        sequence = Sequence(tokens, SamplingParams(max_tokens=1), num_computed_tokens=start)
        first = which * 16  # of 64 blocks; taken backwards, so that no two neighbours follow each other
        sequence.block_table = list(range(first, first + 16))[::-1]
        slots = torch.tensor(sequence.block_table)[torch.arange(start) // BLOCK_SIZE] * BLOCK_SIZE
        kv = torch.randn(NUM_LAYERS, 2, 64, KV_HEADS, HEAD_DIM, generator=generator).to(DTYPE)
        held[:, :, slots + torch.arange(start) % BLOCK_SIZE] = kv[:, :, :start]
        scheduled.append(ScheduledSequence(sequence, start, end - start))
    batch = build_batch(scheduled, BLOCK_SIZE, CPU)
    return Work(replace(batch, logits_indices=torch.arange(len(batch.token_ids))), held)


@dataclass(frozen=True)
class Packer:
    kernels: NativeKernels
    weights: WeightFormat

    def linear(self, linear: Linear) -> PackedLinear:
        return self.kernels.pack_linear(linear.weight, linear.bias, self.weights)

    def swiglu(self, gate_up: Linear) -> PackedLinear:
        return self.kernels.pack_swiglu(gate_up.weight, gate_up.bias, self.weights)


def by_operations(config: ModelConfig, packer: Packer, given: Work) -> tuple[Tensor, Tensor]:
    model, cache, kernels = torch_model(config), empty_cache(), packer.kernels
    cache.write_slots(0, SLOTS, given.kv)
    angles = angle_table(model.rotary, 64)
    x = model.embed_tokens(given.batch.token_ids)
    for layer in model.layers:
        x = layer_by_operations(layer, packer, x, given.batch, cache, angles)
    normed = kernels.rms_norm(x, model.norm.weight, 1e-5)
    logits = kernels.linear_float32(normed, packer.linear(model.lm_head))
    return logits, cache.read_slots(0, NUM_LAYERS, SLOTS)


def layer_by_operations(
    layer: Layer, packer: Packer, x: Tensor, batch: Batch, cache: KVCache, angles: Tensor
) -> Tensor:
    attention, mlp, kernels = layer.self_attention, layer.mlp, packer.kernels
    qkv, o, down = map(packer.linear, (attention.qkv_proj, attention.o_proj, mlp.down_proj))
    gate_up = packer.swiglu(mlp.gate_up_proj)
    turned = kernels.linear(kernels.rms_norm(x, layer.attention_norm.weight, 1e-5), qkv)
    if attention.head_norms is not None:
        norms, by_head = attention.head_norms, turned.view(len(x), -1, HEAD_DIM)
        kernels.head_norms(by_head, norms.q_norm.weight, norms.k_norm.weight, KV_HEADS, 1e-5)
    caches = cache.layer(attention.layer)
    q = kernels.rotary_and_cache(turned, angles, batch.positions, batch.slot_mapping, caches)
    attended = kernels.attention(q, *caches, batch.attention, attention.scale, attention.window)
    x = kernels.linear(attended.flatten(1), o, residual=x)
    return kernels.linear(kernels.swiglu(kernels.rms_norm(x, layer.mlp_norm.weight, 1e-5), gate_up), down, residual=x)


@pytest.mark.parametrize("weights", WeightFormat)
@pytest.mark.parametrize("parts", [MIXED, MIXED[:2], MIXED[2:3]], ids=["mixed", "decodes", "prompt"])
def test_a_step_is_the_same_bits_as_its_operations(
    config: ModelConfig, two_threads: NativeKernels, parts: Seq[tuple[int, int, int]], weights: WeightFormat
) -> None:
    given = work(parts)
    logits, cache = given.run(Native(config, two_threads, weights))
    expected, expected_cache = by_operations(config, Packer(two_threads, weights), given)
    assert torch.equal(logits, expected)
    assert logits.isfinite().all()
    assert torch.equal(cache.isnan(), expected_cache.isnan())
    assert torch.equal(cache.nan_to_num(), expected_cache.nan_to_num())


def test_logits_are_those_of_the_wanted_rows(config: ModelConfig, one_thread: NativeKernels) -> None:
    native, given = Native(config, one_thread), work(MIXED)
    every_row, _ = given.run(native)
    for wanted in ([0, 1, 31], [31], [5, 2], []):
        rows = torch.tensor(wanted, dtype=torch.int64)
        logits, _ = replace(given, batch=replace(given.batch, logits_indices=rows)).run(native)
        assert torch.equal(logits, every_row[rows])


def test_a_rows_result_depends_on_neither_the_threads_nor_the_batch(
    config: ModelConfig, one_thread: NativeKernels, two_threads: NativeKernels
) -> None:
    one, two = (Native(config, kernels) for kernels in (one_thread, two_threads))
    together, _ = work(MIXED).run(two)
    assert torch.equal(together, work(MIXED).run(one)[0])
    alone = [work([part]).run(two)[0] for part in MIXED]
    assert torch.equal(together, torch.cat(alone))


def test_what_the_memory_holds_does_not_matter_nor_whether_it_grew(
    config: ModelConfig, one_thread: NativeKernels
) -> None:
    kept = Native(config, one_thread)
    for parts in (MIXED[:1], MIXED, MIXED[:2], MIXED[2:], MIXED[:1]):
        for memory in (kept.forward._step._x, kept.forward._step._workspace, kept.forward._step._logits):
            memory.fill_(torch.nan)
        given = work(parts)
        assert torch.equal(given.run(kept)[0], given.run(Native(config, one_thread))[0])


def test_each_layer_is_announced_with_its_keys_and_values_in_the_cache_and_no_later_ones(
    config: ModelConfig, one_thread: NativeKernels
) -> None:
    native, given = Native(config, one_thread), work(MIXED)
    expected, after = given.run(native)
    native.kv_cache.write_slots(0, SLOTS, given.kv)
    announced: list[int] = []

    def on_layer_computed(layer: int) -> None:
        announced.append(layer)
        seen = native.kv_cache.read_slots(0, NUM_LAYERS, SLOTS).nan_to_num()
        done = torch.cat((after[: layer + 1], given.kv[layer + 1 :])).nan_to_num()
        assert torch.equal(seen, done)

    assert torch.equal(native.forward(given.batch, on_layer_computed), expected)
    assert announced == [0, 1]


@pytest.mark.parametrize("field", ["token_ids", "positions"])
@pytest.mark.parametrize("wrong", [-1, 64, 2**40])
def test_a_token_or_a_position_that_there_is_not_is_refused_before_anything_is_computed(
    one_thread: NativeKernels, field: str, wrong: int
) -> None:
    native, given = Native(PLAIN, one_thread), work(MIXED)
    broken = replace(given.batch, **{field: getattr(given.batch, field).index_fill(0, torch.tensor([9]), wrong)})
    native.kv_cache.write_slots(0, SLOTS, given.kv)
    with pytest.raises(IndexError, match=r"\[0, 50\).*\[0, 64\)"):
        native.forward(broken, None)
    assert torch.equal(native.kv_cache.read_slots(0, NUM_LAYERS, SLOTS).nan_to_num(), given.kv.nan_to_num())
