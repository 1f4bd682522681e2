"""Loading .gguf files: every quantisation against the gguf library's own numbers, the model against transformers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
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
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from common.errors import ModelError
from common.model_source import resolve_model
from engine.model.gguf_weights import GGUFCheckpoint
from engine.model.layers import rotary_frequencies
from engine.model.placements import placements
from engine.model.weights import load_model, open_checkpoint

CPU = torch.device("cpu")
Q = GGMLQuantizationType
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Where llama.cpp's converter puts each Hugging Face weight; written out here, not taken from the code under test.
GGUF_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
}
GGUF_ARCHITECTURES = {"mistral": "llama", "mixtral": "llama", "qwen3_moe": "qwen3moe"}  # where it is not the model type
GGUF_ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
PROMPT = torch.randint(0, 96, (40,), generator=torch.Generator().manual_seed(3)).tolist()


def llama(**changes: Any) -> PreTrainedModel:
    return random_model(LlamaForCausalLM(LlamaConfig(**SIZES | changes)))


def qwen2() -> PreTrainedModel:
    return random_model(Qwen2ForCausalLM(Qwen2Config(**SIZES)))


def qwen3() -> PreTrainedModel:
    return random_model(Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=32)))


def mistral_with_a_window() -> PreTrainedModel:
    return random_model(MistralForCausalLM(MistralConfig(**SIZES, sliding_window=11)))


def mixtral() -> PreTrainedModel:
    return random_model(MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)))


def qwen3_moe() -> PreTrainedModel:
    experts = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "norm_topk_prob": True}
    return random_model(Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts)))


def random_model(model: PreTrainedModel) -> PreTrainedModel:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + (parameter.dim() == 1))
    return model.float().eval()


def gguf_name(name: str) -> str:
    stem, suffix = name.rsplit(".", 1)
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
    return f"blk.{layer[1]}.{GGUF_PARTS[layer[2]]}.{suffix}" if layer else f"{GGUF_ENDS[stem]}.{suffix}"


def permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k of llama models."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def write_metadata(writer: GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_eos_token_id(2)
    writer.add_token_list([f"token{i}" for i in range(config.vocab_size)])
    writer.add_token_types([1] * config.vocab_size)
    if config.model_type == "qwen3":
        writer.add_key_length(config.head_dim)
    if config.model_type == "mistral":
        writer.add_sliding_window(config.sliding_window)
    if config.model_type in ("mixtral", "qwen3_moe"):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type == "qwen3_moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def gguf_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Under their GGUF names, views of the model's own weights; transformers keeps experts' gates and ups as one."""
    for name, parameter in model.named_parameters():
        weight = parameter.detach()
        if name.endswith("experts.gate_up_proj"):
            block = f"blk.{name.split('.')[2]}"
            gate, up = weight.chunk(2, dim=1)
            yield from ((f"{block}.ffn_gate_exps.weight", gate), (f"{block}.ffn_up_exps.weight", up))
        elif name.endswith("experts.down_proj"):
            yield f"blk.{name.split('.')[2]}.ffn_down_exps.weight", weight
        else:
            yield gguf_name(name), weight


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    kind: GGMLQuantizationType = Q.F32,
    customise: Callable[[GGUFWriter], None] | None = None,
) -> Path:
    """Write `model` as llama.cpp would and round its own weights to what the file now holds."""
    config = model.config
    architecture = GGUF_ARCHITECTURES.get(config.model_type, config.model_type)
    writer = GGUFWriter(path, architecture)
    write_metadata(writer, config)
    if customise is not None:
        customise(writer)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, parameter in gguf_tensors(model):
        weight = parameter.numpy()
        stored_as = kind if weight.ndim > 1 else Q.F32
        part = name.split(".")[-2]
        stored = permute(weight, heads[part]) if architecture == "llama" and part in heads else weight
        writer.add_tensor(name, quantize(stored, stored_as), raw_dtype=stored_as)
        parameter.copy_(torch.from_numpy(dequantize(quantize(weight, stored_as), stored_as)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def expected_logits(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


@pytest.mark.parametrize("kind", [Q.F32, Q.F16, Q.BF16, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0], ids=lambda k: k.name)
@pytest.mark.parametrize("make", [llama, qwen2], ids=lambda make: make.__name__)
def test_a_model_in_any_quantisation_answers_as_transformers_with_the_same_rounded_weights(
    make: Callable[[], PreTrainedModel], kind: GGMLQuantizationType, paged_run: Any, tmp_path: Path
) -> None:
    model = make()
    loaded = load_model(write_gguf(tmp_path / "m.gguf", model, kind), torch.float32, CPU)
    assert torch.equal(loaded.model.embed_tokens.weight, model.get_input_embeddings().weight)
    torch.testing.assert_close(
        paged_run(loaded).step({"a": PROMPT}), expected_logits(model, PROMPT), atol=2e-3, rtol=1e-4
    )


@pytest.mark.parametrize(
    "model",
    [llama(tie_word_embeddings=True), llama(attention_bias=True), llama(head_dim=32)],
    ids=["tied_head", "biases", "wide_heads"],
)
def test_variants_of_llama_load_from_gguf(model: PreTrainedModel, paged_run: Any, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", model, customise=lambda w: w.add_key_length(model.config.head_dim))
    logits = paged_run(load_model(path, torch.float32, CPU)).step({"a": PROMPT})
    torch.testing.assert_close(logits, expected_logits(model, PROMPT), atol=2e-3, rtol=1e-4)


@pytest.mark.parametrize("kind", [Q.F32, Q.Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("make", [qwen3, mistral_with_a_window, mixtral, qwen3_moe], ids=lambda make: make.__name__)
def test_other_families_answer_as_transformers_whole_and_in_chunks(
    make: Callable[[], PreTrainedModel], kind: GGMLQuantizationType, paged_run: Any, tmp_path: Path
) -> None:
    model = make()
    loaded = load_model(write_gguf(tmp_path / "m.gguf", model, kind), torch.float32, CPU)
    expected = expected_logits(model, PROMPT)
    for chunk in (len(PROMPT), 7, 1):
        run = paged_run(loaded)
        logits = [run.step({"a": PROMPT[start : start + chunk]}) for start in range(0, len(PROMPT), chunk)]
        torch.testing.assert_close(torch.cat(logits), expected, atol=2e-3, rtol=1e-4)


def test_llama3_scaling_is_read_from_the_divisors_tensor(paged_run: Any, tmp_path: Path) -> None:
    model = llama(rope_parameters=LLAMA3_ROPE)
    plain = rotary_frequencies(open_checkpoint(write_gguf(tmp_path / "plain.gguf", llama())).config.rope, 16)
    divisors = (plain / model.model.rotary_emb.inv_freq).numpy()
    path = write_gguf(tmp_path / "m.gguf", model, customise=lambda w: w.add_tensor("rope_freqs.weight", divisors))
    logits = paged_run(load_model(path, torch.float32, CPU)).step({"a": PROMPT})
    torch.testing.assert_close(logits, expected_logits(model, PROMPT), atol=2e-3, rtol=1e-4)


@pytest.mark.parametrize("kind", [Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K], ids=lambda kind: kind.name)
def test_k_quants_hold_what_the_gguf_library_reads_from_them(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    config = LlamaConfig(**SIZES | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1})
    shapes = {name: parameter.shape for name, parameter in LlamaForCausalLM(config).named_parameters()}
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    write_metadata(writer, config)
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(2)
    stored: dict[str, np.ndarray] = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            writer.add_tensor(gguf_name(name), np.ones(shape, dtype=np.float32))
            continue
        # bytes below 0x3C make every half-precision scale finite and below one
        row_bytes = shape[1] // block_size * block_bytes
        stored[name] = random.integers(0, 0x3C, (shape[0], row_bytes), dtype=np.uint8)
        writer.add_tensor(gguf_name(name), stored[name], raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    parameters = dict(load_model(tmp_path / "m.gguf", torch.float32, CPU).model.named_parameters())
    placed = {placement.name: placement for placement in placements(GGUFCheckpoint(tmp_path / "m.gguf").config)}
    for name, data in stored.items():
        if ".q_proj." in name or ".k_proj." in name:
            continue  # stored in another order; the other tests cover that
        placement = placed[name]
        ours = parameters[placement.parameter][placement.row : placement.row + placement.shape[0]]
        assert np.array_equal(ours.numpy(), dequantize(data, kind)), name


@pytest.mark.slow  # transformers' own GGUF reader takes most of it
def test_the_default_model_loads_as_transformers_loads_it(paged_run: Any) -> None:
    path = resolve_model("smollm2-135m-instruct")
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    oracle = LlamaForCausalLM(config).eval()
    weights = load_gguf_checkpoint(path, return_tensors=True, model_to_load=oracle)["tensors"]
    assert oracle.load_state_dict(weights, strict=False).missing_keys == ["lm_head.weight"]  # tied
    oracle.tie_weights()
    loaded = load_model(path, torch.float32, CPU)

    prompt = torch.randint(0, 49152, (70,), generator=torch.Generator().manual_seed(9)).tolist()
    logits = paged_run(loaded).step({"a": prompt})
    torch.testing.assert_close(logits, expected_logits(oracle, prompt), atol=2e-3, rtol=1e-4)
    assert loaded.config.eos_token_ids == (2,)
    assert loaded.config.max_position_embeddings == 8192


# ---------------------------------------------------------------- broken files


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", llama(), Q.Q8_0)


def complaint_about(path: Path) -> str | None:
    """What loading complains about; None when it loads. Anything but a ModelError escapes."""
    try:
        load_model(path, torch.float32, CPU)
    except ModelError as error:
        return str(error)
    return None


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fraction=st.floats(0, 0.9999))
def test_a_file_cut_anywhere_is_a_model_error_that_names_it(intact: Path, tmp_path: Path, fraction: float) -> None:
    content = intact.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(content[: int(len(content) * fraction)])
    complaint = complaint_about(path)
    assert complaint is not None
    assert re.search(r"cut\.gguf.* fetch the model again", complaint)


@settings(
    max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(edits=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_damaged_header_loads_or_is_a_model_error_that_names_the_file(
    intact: Path, tmp_path: Path, edits: list[tuple[float, int]]
) -> None:
    damaged = bytearray(intact.read_bytes())
    header_bytes = damaged.rindex(b".weight") + 40
    for place, value in edits:
        damaged[int(place * header_bytes)] = value
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damaged)
    complaint = complaint_about(path)
    assert complaint is None or "damaged.gguf" in complaint


@pytest.mark.parametrize("kind", [Q.F32, Q.Q8_0], ids=lambda kind: kind.name)
def test_weights_that_are_not_finite_are_refused_by_name(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    model = llama()
    model.model.layers[1].mlp.up_proj.weight.data[3, 40] = float("inf")
    with np.errstate(invalid="ignore"):
        path = write_gguf(tmp_path / "m.gguf", model, kind)
    with pytest.raises(ModelError, match=r"m\.gguf: model\.layers\.1\.mlp\.up_proj\.weight .* not finite"):
        load_model(path, torch.float32, CPU)


@pytest.mark.parametrize("content", [b"", b"GGU", b"GGUF", b"not a model at all", b"GGUF\x00\x00\x00\x03" + bytes(40)])
def test_what_is_not_gguf_is_a_model_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "garbage.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"garbage\.gguf"):
        load_model(path, torch.float32, CPU)


def test_a_missing_file_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot read .*absent\.gguf"):
        load_model(tmp_path / "absent.gguf", torch.float32, CPU)


def test_unsupported_models_are_refused_by_name(tmp_path: Path) -> None:
    def customised(name: str, customise: Callable[[GGUFWriter], None]) -> Path:
        return write_gguf(tmp_path / name, llama(), customise=customise)

    partial = customised("partial.gguf", lambda w: w.add_rope_dimension_count(8))
    yarn = customised("yarn.gguf", lambda w: w.add_string("llama.rope.scaling.type", "yarn"))
    for path, complaint in (
        (partial, "only a part of each head"),
        (yarn, "rotary scaling 'yarn'"),
    ):
        with pytest.raises(ModelError, match=complaint):
            load_model(path, torch.float32, CPU)
    writer = GGUFWriter(tmp_path / "other.gguf", "gptneox")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(
        ModelError, match=r"general\.architecture is 'gptneox'; supported are llama, qwen2, qwen3, qwen3moe"
    ):
        load_model(tmp_path / "other.gguf", torch.float32, CPU)


def test_experts_that_the_file_does_not_hold_are_named(tmp_path: Path) -> None:
    def promise_experts(writer: GGUFWriter) -> None:
        writer.add_expert_count(8)
        writer.add_expert_used_count(2)

    path = write_gguf(tmp_path / "m.gguf", llama(), customise=promise_experts)
    with pytest.raises(ModelError, match=r"has no tensor blk\.0\.ffn_gate_inp\.weight"):
        load_model(path, torch.float32, CPU)

    model = mixtral()
    model.config.num_local_experts = 5
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight = torch.nn.Parameter(torch.zeros(5, 64))
    path = write_gguf(tmp_path / "fewer.gguf", model)
    with pytest.raises(ModelError, match=r"ffn_gate_exps\.weight has shape \[4, 96, 64\] and no expert 4"):
        load_model(path, torch.float32, CPU)


def test_a_quantisation_we_do_not_read_is_refused_by_name(tmp_path: Path) -> None:
    def odd(writer: GGUFWriter) -> None:
        writer.add_tensor("output.weight", np.zeros((96, 64), dtype=np.float64))

    path = write_gguf(tmp_path / "m.gguf", llama(tie_word_embeddings=True), customise=odd)
    with pytest.raises(ModelError, match=r"output\.weight is stored as F64; supported are F32, F16, BF16, Q4_0"):
        load_model(path, torch.float32, CPU)
