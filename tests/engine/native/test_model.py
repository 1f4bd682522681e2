"""Whole models on the native kernels: as near to the float32 model as torch's own bfloat16, in every kind of step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from common.engine_config import EngineConfig
from common.errors import ConfigError
from common.sampling import SamplingParams
from engine.attention.torch_reference import TorchReferenceAttention
from engine.batch import build_batch
from engine.build import DEFAULT_THREADS, build_engine
from engine.engine import Engine
from engine.forward import EagerForward, Forward
from engine.kv_cache import KVCache, KVCacheShape
from engine.model.layers import Linear
from engine.model.weights import LoadedModel, load_model
from engine.native import load
from engine.native.forward import NativeForward
from engine.native.kernels import NativeKernels
from engine.native.model import accelerate, misfit
from engine.native.packing import WeightFormat
from engine.sequence import ScheduledSequence, Sequence

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 150,
    "hidden_size": 128,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama, tied head": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "qwen2, biases": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3, head norms": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
    "mistral, window": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=9)),
    "qwen3-moe, experts and head norms": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
    ),
    "mixtral, experts": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4)),
}


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(3)
    FAMILIES[request.param]().save_pretrained(tmp_path)
    return tmp_path


def test_logits_are_as_near_to_float32_as_torchs_own_bfloat16(folder: Path, two_threads: NativeKernels) -> None:
    exact, rounded = (_logits(load_model(folder, dtype, CPU), _in_torch) for dtype in (torch.float32, torch.bfloat16))
    loaded = load_model(folder, torch.bfloat16, CPU)
    assert misfit(loaded) is None
    native = _logits(loaded, lambda loaded, cache: accelerate(loaded, two_threads, cache))
    assert native.dtype == torch.float32
    torch_error, native_error = ((each - exact).abs().median() for each in (rounded, native))
    assert 0 < native_error <= 1.3 * torch_error
    assert exact.std() > 20 * native_error


@pytest.mark.parametrize("folder", [name for name in FAMILIES if "experts" not in name], indirect=True)
def test_int8_logits_are_as_near_to_what_the_codes_stand_for(folder: Path, two_threads: NativeKernels) -> None:
    exact, rounded = (_with_steps(load_model(folder, dtype, CPU)) for dtype in (torch.float32, torch.bfloat16))
    loaded = load_model(folder, torch.bfloat16, CPU)
    native = _logits(loaded, lambda loaded, cache: accelerate(loaded, two_threads, cache, WeightFormat.INT8))
    expected = _logits(exact, _in_torch)
    torch_error = (_logits(rounded, _in_torch) - expected).abs().median()
    assert (native - expected).abs().median() <= 1.3 * torch_error
    unquantised = _logits(load_model(folder, torch.float32, CPU), _in_torch)
    assert not torch.allclose(expected, unquantised, atol=torch_error.item())  # there is something to tell apart


def test_a_model_is_called_whole_but_for_experts(folder: Path, one_thread: NativeKernels) -> None:
    loaded = load_model(folder, torch.bfloat16, CPU)
    forward = accelerate(loaded, one_thread, _cache(loaded))
    assert isinstance(forward, NativeForward) == (loaded.config.experts is None)


def test_the_default_models_greedy_tokens_are_torchs(two_threads: NativeKernels) -> None:
    from common.config import DEFAULT_MODEL
    from common.model_source import resolve_model

    config = EngineConfig(resolve_model(DEFAULT_MODEL), dtype="bfloat16", num_threads=1, kv_cache_bytes=64 << 20)
    prompt = list(range(1000, 1040))
    answers = []
    for attention in ("native", "cpu"):
        engine = build_engine(EngineConfig(**{**vars(config), "attention": attention}))
        sequence = Sequence(list(prompt), SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
        engine.add(sequence)
        while engine.has_work:
            engine.step(_Nobody())
        answers.append(sequence.token_ids[40:])
    assert answers[0] == answers[1]


MISFITS = {
    "head_dim is 48 with 2 query heads": {"head_dim": 48},
    "head_dim is 288 with 2 query heads": {"head_dim": 288},
    "with 193 query heads to a kv head": {"num_attention_heads": 193, "num_key_value_heads": 1, "hidden_size": 386},
    "layers.0.mlp.down_proj takes 175 numbers": {"intermediate_size": 175},
    "takes 129 numbers": {"hidden_size": 129, "num_attention_heads": 3, "num_key_value_heads": 1},
}


@pytest.fixture(params=MISFITS)
def misfitting(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    config = LlamaConfig(**{**SIZES, "num_hidden_layers": 1, **MISFITS[request.param]})
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path, request.param


def test_auto_keeps_torch_for_a_shape_that_does_not_suit_and_says_why(
    misfitting: tuple[Path, str], caplog: pytest.LogCaptureFixture
) -> None:
    folder, reason = misfitting
    build_engine(EngineConfig(folder, dtype="bfloat16", num_threads=1, kv_cache_bytes=1 << 20))
    [message] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert message.startswith("native kernels are off: ")
    assert reason in message


def test_asking_for_the_kernels_where_the_shape_does_not_suit_is_a_config_error(misfitting: tuple[Path, str]) -> None:
    folder, reason = misfitting
    with pytest.raises(ConfigError, match=f"attention: native .*{reason}"):
        build_engine(EngineConfig(folder, dtype="bfloat16", attention="native", num_threads=1, kv_cache_bytes=1 << 20))


def test_asking_for_the_kernels_in_another_dtype_is_a_config_error(folder: Path) -> None:
    with pytest.raises(ConfigError, match="they compute in bfloat16, the model in float32"):
        build_engine(EngineConfig(folder, dtype="float32", attention="native", kv_cache_bytes=1 << 20))


@pytest.mark.parametrize("changes", [{"dtype": "float32"}, {"attention": "cpu"}])
def test_int8_without_the_kernels_is_a_config_error(folder: Path, changes: dict[str, str]) -> None:
    config = EngineConfig(folder, dtype="bfloat16", device="cpu", quantization="int8", kv_cache_bytes=1 << 20)
    with pytest.raises(ConfigError, match=r"dtype bfloat16.*attention auto or native.*use quantization: none"):
        build_engine(replace(config, **changes))  # type: ignore[arg-type]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("folder", ["mixtral, experts"], indirect=True)
def test_int8_is_for_models_without_experts(folder: Path) -> None:
    with pytest.raises(ConfigError, match="without experts"):
        build_engine(EngineConfig(folder, dtype="bfloat16", device="cpu", quantization="int8", kv_cache_bytes=1 << 20))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("folder", ["qwen2, biases"], indirect=True)
def test_an_engine_computes_with_int8_and_may_pair_with_one_that_does_not(folder: Path) -> None:
    config = EngineConfig(folder, dtype="bfloat16", device="cpu", kv_cache_bytes=1 << 20)
    engines = [build_engine(replace(config, quantization=quantization)) for quantization in ("none", "int8")]
    assert engines[0].layout == engines[1].layout
    plain, int8 = (_kv_of_a_prompt(engine) for engine in engines)
    assert not torch.equal(plain, int8)
    assert (plain - int8).abs().median() < 0.05 * plain.abs().median()


def test_asking_for_the_kernels_on_another_machine_is_a_config_error_that_says_what_it_lacks(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": False})
    load._library.cache_clear()
    try:
        with pytest.raises(ConfigError, match="this CPU has not both AVX512-BF16"):
            build_engine(EngineConfig(folder, dtype="bfloat16", attention="native", kv_cache_bytes=1 << 20))
    finally:
        load._library.cache_clear()


def test_auto_keeps_torch_for_float32(folder: Path) -> None:
    engine = build_engine(EngineConfig(folder, dtype="float32", kv_cache_bytes=1 << 20))
    assert engine.layout.dtype == "float32"


@pytest.mark.usefixtures("one_thread")  # skips where there are none
def test_an_engine_on_the_kernels_takes_no_threads_from_the_next_engine(tmp_path: Path) -> None:
    """It leaves torch one thread, and says so to nobody."""
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    build_engine(EngineConfig(tmp_path, dtype="bfloat16", attention="native", num_threads=2, kv_cache_bytes=1 << 20))
    assert torch.get_num_threads() == 1
    build_engine(EngineConfig(tmp_path, dtype="float32", kv_cache_bytes=1 << 20))
    assert torch.get_num_threads() == DEFAULT_THREADS


@pytest.mark.parametrize("options", [{}, {"top_k": 20}, {"top_p": 0.9}])
def test_an_engine_on_the_kernels_samples_the_same_alone_and_in_a_batch(
    options: dict[str, float], tmp_path: Path, one_thread: NativeKernels
) -> None:
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    engine = build_engine(EngineConfig(tmp_path, dtype="bfloat16", attention="native", kv_cache_bytes=1 << 20))

    def answers(seeds: list[int]) -> list[list[int]]:
        params = [SamplingParams(6, seed=seed, ignore_eos=True, **options) for seed in seeds]  # type: ignore[arg-type]
        sequences = [Sequence([5, 6, 7 + each.seed], each) for each in params]
        for sequence in sequences:
            engine.add(sequence)
        while engine.has_work:
            engine.step(_Nobody())
        return [sequence.token_ids[3:] for sequence in sequences]

    together = answers(list(range(8)))
    assert together == [answers([seed])[0] for seed in range(8)]
    assert len(set(map(tuple, together))) == 8


class _Nobody:
    def on_scheduled(self, scheduled: object) -> None: ...

    def on_sampled(self, sampled: object) -> None: ...


def _kv_of_a_prompt(engine: Engine) -> Tensor:
    sequence = Sequence(list(range(3, 23)), SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
    engine.add(sequence)
    engine.step(_Nobody())
    return engine.read_kv(sequence, (0, 3), (0, 20)).clone()


@torch.inference_mode()
def _logits(loaded: LoadedModel, forward_of: Callable[[LoadedModel, KVCache], Forward]) -> Tensor:
    """Of every step of three prompts: a chunk each, then mixed steps, then decode steps; over scattered blocks."""
    forward = forward_of(loaded, _cache(loaded))
    generator = torch.Generator().manual_seed(5)
    blocks = torch.randperm(40, generator=generator).tolist()
    sequences = []
    for length in (21, 7, 30):
        tokens = torch.randint(3, 150, (length + 4,), generator=generator).tolist()
        sequence = Sequence(tokens, SamplingParams(max_tokens=1))
        sequence.block_table = [blocks.pop() for _ in range(-(-len(tokens) // 4))]
        sequences.append(sequence)
    found = []
    for ends in ((12, 1, 30), (21, 7, 31), (22, 8, 32), (23, 9, 33), (24, 10, 34)):
        parts = [
            ScheduledSequence(each, each.num_computed_tokens, end - each.num_computed_tokens)
            for each, end in zip(sequences, ends, strict=True)
        ]
        parts.sort(key=lambda part: part.num_scheduled_tokens > 1)
        batch = build_batch(parts, 4, CPU)
        every_row = torch.arange(len(batch.token_ids))
        batch = type(batch)(batch.token_ids, batch.positions, batch.slot_mapping, every_row, batch.attention)
        found.append(forward(batch, None).clone())
        for part in parts:
            part.sequence.num_computed_tokens = part.end
    return torch.cat(found)


def _with_steps(loaded: LoadedModel) -> LoadedModel:
    """Every linear weight as its int8 code stands for it, but not the embedding that a tied head shares."""
    for module in loaded.model.modules():
        if isinstance(module, Linear):
            scale = module.weight.float().abs().amax(dim=1, keepdim=True) / 127
            in_steps = ((module.weight.float() / scale).round() * scale).to(loaded.model.dtype)
            module.weight = nn.Parameter(in_steps, requires_grad=False)
    return loaded


def _in_torch(loaded: LoadedModel, cache: KVCache) -> Forward:
    return EagerForward(loaded.model, cache, TorchReferenceAttention())


def _cache(loaded: LoadedModel) -> KVCache:
    """NaN wherever nothing was written."""
    config, dtype = loaded.config, loaded.model.dtype
    cache = KVCache(KVCacheShape(config.num_layers, 40, 4, config.num_kv_heads, config.head_dim), dtype, CPU)
    cache.write_slots(0, torch.arange(160), torch.full((config.num_layers, 2, 160, 2, 32), torch.nan, dtype=dtype))
    return cache
