"""A layer in one call: the same bits as its operations one by one, whatever was computed before or beside it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from common.sampling import SamplingParams
from engine.attention.torch_reference import TorchReferenceAttention
from engine.batch import Batch, build_batch
from engine.kv_cache import KVCache, KVCacheShape
from engine.model.config import ModelConfig, RopeConfig
from engine.model.decoder import Layer
from engine.model.layers import RotaryEmbedding
from engine.native.attention import NativeAttention, NativeRotaryEmbedding, NativeRotation
from engine.native.kernels import NativeKernels
from engine.native.layer import LayerStep, NativeLayer
from engine.sequence import ScheduledSequence, Sequence

CPU, DTYPE = torch.device("cpu"), torch.bfloat16
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 96, 6, 2, 32, 4
MIXED = ((0, 40, 41), (1, 8, 9), (2, 0, 30), (3, 15, 22))  # decodes, a prompt, a chunk


@pytest.fixture(params=[(False, None), (True, None), (False, 7)], ids=["plain", "biases", "window"])
def config(request: pytest.FixtureRequest) -> ModelConfig:
    has_bias, window = request.param
    return ModelConfig(
        vocab_size=50,
        hidden_size=HIDDEN,
        intermediate_size=130,
        num_layers=2,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=10000.0),
        tie_word_embeddings=False,
        attention_bias=has_bias,
        attention_output_bias=has_bias,
        max_position_embeddings=64,
        eos_token_ids=(),
        windows=(None, window),
    )


@dataclass(frozen=True)
class Work:
    """A step, and a cache that holds the tokens before it; NaN elsewhere."""

    x: Tensor
    rotation: NativeRotation
    batch: Batch
    kv_cache: KVCache

    def run(self, layer: NativeLayer, kernels: NativeKernels) -> tuple[Tensor, Tensor]:
        """The layer's output and the cache after it; neither the input nor the cache is changed."""
        slots = torch.arange(64 * BLOCK_SIZE)
        cache = empty_cache()
        cache.write_slots(0, slots, self.kv_cache.read_slots(0, 2, slots))
        out = layer(self.x.clone(), self.rotation, self.batch, cache, NativeAttention(kernels))
        return out, cache.read_slots(0, 2, slots)


def empty_cache() -> KVCache:
    cache = KVCache(KVCacheShape(2, 64, BLOCK_SIZE, KV_HEADS, HEAD_DIM), DTYPE, CPU)
    shape = (2, 2, 64 * BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    cache.write_slots(0, torch.arange(64 * BLOCK_SIZE), torch.full(shape, torch.nan, dtype=DTYPE))
    return cache


def work(config: ModelConfig, kernels: NativeKernels, parts: Seq[tuple[int, int, int]]) -> Work:
    """parts: (which sequence, first token, end); a sequence's numbers do not depend on what else there is."""
    cache, xs, scheduled = empty_cache(), [], []
    for which, start, end in parts:
        generator = torch.Generator().manual_seed(which)
        x = torch.randn(64, HIDDEN, generator=generator).to(DTYPE)
        kv = torch.randn(2, 2, 64, KV_HEADS, HEAD_DIM, generator=generator).to(DTYPE)
        sequence = Sequence([1] * 64, SamplingParams(max_tokens=1), num_computed_tokens=start)
        first = which * 16  # of 64 blocks; taken backwards, so that no two neighbours follow each other
        sequence.block_table = list(range(first, first + 16))[::-1]
        slots = torch.tensor(sequence.block_table)[torch.arange(start) // BLOCK_SIZE] * BLOCK_SIZE
        cache.write_slots(0, slots + torch.arange(start) % BLOCK_SIZE, kv[:, :, :start])
        xs.append(x[start:end])
        scheduled.append(ScheduledSequence(sequence, start, end - start))
    batch = build_batch(scheduled, BLOCK_SIZE, CPU)
    rotary = NativeRotaryEmbedding(RotaryEmbedding(config.rope, HEAD_DIM, CPU), kernels)
    return Work(torch.cat(xs), rotary.rotation(batch.positions, DTYPE), batch, cache)


def torch_layer(config: ModelConfig) -> Layer:
    layer = Layer(config, 1, DTYPE, CPU)
    generator = torch.Generator().manual_seed(7)
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return layer


def by_parts(layer: Layer, kernels: NativeKernels, given: Work) -> Tensor:
    attention, mlp, x = layer.self_attention, layer.mlp, given.x
    qkv = kernels.pack_linear(attention.qkv_proj.weight, attention.qkv_proj.bias)
    o = kernels.pack_linear(attention.o_proj.weight, attention.o_proj.bias)
    gate_up, down = kernels.pack_swiglu(mlp.gate_up_proj.weight), kernels.pack_linear(mlp.down_proj.weight)
    turned = kernels.linear(kernels.rms_norm(x, layer.attention_norm.weight, 1e-5), qkv)
    q = given.rotation.into_cache(turned, given.kv_cache, 1, given.batch.slot_mapping)
    caches = given.kv_cache.layer(1)
    attended = kernels.attention(q, *caches, given.batch.attention, attention.scale, attention.window)
    x = kernels.linear(attended.flatten(1), o, residual=x)
    return kernels.linear(kernels.swiglu(kernels.rms_norm(x, layer.mlp_norm.weight, 1e-5), gate_up), down, residual=x)


@pytest.mark.parametrize("parts", [MIXED, MIXED[:2], MIXED[2:3]], ids=["mixed", "decodes", "prompt"])
def test_a_layer_is_the_same_bits_as_its_operations(
    config: ModelConfig, two_threads: NativeKernels, parts: Seq[tuple[int, int, int]]
) -> None:
    layer, given = torch_layer(config), work(config, two_threads, parts)
    out, cache = given.run(NativeLayer(layer, two_threads, LayerStep()), two_threads)
    assert torch.equal(out, by_parts(layer, two_threads, given))
    assert out.isfinite().all()
    expected = given.kv_cache.read_slots(0, 2, torch.arange(64 * BLOCK_SIZE))
    assert torch.equal(cache.isnan(), expected.isnan())
    assert torch.equal(cache.nan_to_num(), expected.nan_to_num())


def test_a_rows_result_depends_on_neither_the_threads_nor_the_batch(
    config: ModelConfig, one_thread: NativeKernels, two_threads: NativeKernels
) -> None:
    layer = torch_layer(config)
    one, two = (NativeLayer(layer, kernels, LayerStep()) for kernels in (one_thread, two_threads))
    together, _ = work(config, two_threads, MIXED).run(two, two_threads)
    assert torch.equal(together, work(config, one_thread, MIXED).run(one, one_thread)[0])
    alone = [work(config, two_threads, [part]).run(two, two_threads)[0] for part in MIXED]
    assert torch.equal(together, torch.cat(alone))


def test_what_the_workspace_holds_does_not_matter_nor_whether_it_grew(
    config: ModelConfig, one_thread: NativeKernels
) -> None:
    layer = torch_layer(config)
    step = LayerStep()
    kept = NativeLayer(layer, one_thread, step)
    for parts in (MIXED[:1], MIXED, MIXED[:2], MIXED[2:], MIXED[:1]):
        step._workspace.fill_(torch.nan)
        fresh = NativeLayer(layer, one_thread, LayerStep())
        given = work(config, one_thread, parts)
        assert torch.equal(given.run(kept, one_thread)[0], given.run(fresh, one_thread)[0])


def test_layers_that_share_a_step_do_not_disturb_each_other(config: ModelConfig, one_thread: NativeKernels) -> None:
    layer, step, given = torch_layer(config), LayerStep(), work(config, one_thread, MIXED)
    first, second = NativeLayer(layer, one_thread, step), NativeLayer(layer, one_thread, step)
    outputs = [given.run(each, one_thread)[0] for each in (first, second, first)]
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_another_attention_than_the_kernels_own_is_refused(config: ModelConfig, one_thread: NativeKernels) -> None:
    layer, given = NativeLayer(torch_layer(config), one_thread, LayerStep()), work(config, one_thread, MIXED)
    with pytest.raises(AssertionError):
        layer(given.x, given.rotation, given.batch, given.kv_cache, TorchReferenceAttention())
