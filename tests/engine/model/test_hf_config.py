"""config.json as people have it: old and new spellings, and everything that is not supported."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.errors import ModelError
from engine.model.config import ExpertsConfig, Llama3Scaling, RopeConfig
from engine.model.hf_config import read_hf_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2}
QWEN3_MOE = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 64}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def write(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))
    return folder


def test_keys_that_old_files_leave_out_have_transformers_defaults(folder: Path) -> None:
    config = read_hf_config(write(folder))
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (4, 16, 1e-6)
    assert config.rope == RopeConfig(10000.0)
    flags = (config.tie_word_embeddings, config.attention_bias, config.attention_output_bias)
    assert flags == (False, False, False)
    assert config.eos_token_ids == ()


@pytest.mark.parametrize(
    ("written", "rope"),
    [
        ({"rope_theta": 5e5}, RopeConfig(5e5)),
        ({"rope_theta": 5e5, "rope_scaling": None}, RopeConfig(5e5)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, RopeConfig(5e5)),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}, RopeConfig(5e5, linear_factor=2.0)),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            RopeConfig(5e5, llama3=Llama3Scaling(8.0, 1.0, 4.0, 8192)),
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
            RopeConfig(5e5, llama3=Llama3Scaling(8.0, 1.0, 4.0, 8192)),
        ),
    ],
)
def test_rotary_parameters_are_read_in_old_and_new_spelling(
    folder: Path, written: dict[str, Any], rope: RopeConfig
) -> None:
    assert read_hf_config(write(folder, **written)).rope == rope


def test_ropes_that_differ_are_described_differently() -> None:
    ropes = [
        RopeConfig(1e4),
        RopeConfig(5e5),
        RopeConfig(1e4, linear_factor=2.0),
        RopeConfig(1e4, llama3=Llama3Scaling(8.0, 1.0, 4.0, 8192)),
        RopeConfig(1e4, llama3=Llama3Scaling(32.0, 1.0, 4.0, 8192)),
        RopeConfig(1e4, frequency_divisors=(1.0, 2.0)),
        RopeConfig(1e4, frequency_divisors=(1.0, 4.0)),
    ]
    assert len({rope.describe() for rope in ropes}) == len(ropes)


def test_ids_that_end_an_answer_come_from_both_files(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5]}))
    assert read_hf_config(write(folder, eos_token_id=5)).eos_token_ids == (7, 5)


def test_qwen2_always_has_biases_on_q_k_and_v_alone(folder: Path) -> None:
    config = read_hf_config(write(folder, architectures=["Qwen2ForCausalLM"]))
    assert config.attention_bias
    assert not config.attention_output_bias


def test_qwen3_normalises_heads_whose_size_does_not_follow_from_the_hidden_size(folder: Path) -> None:
    config = read_hf_config(write(folder, architectures=["Qwen3ForCausalLM"]))
    assert config.qk_norm
    assert config.head_dim == 128


@pytest.mark.parametrize(
    ("family", "written", "windows"),
    [
        ("Mistral", {"sliding_window": 64}, (64, 64)),
        ("Mistral", {"sliding_window": 128}, ()),  # as long as the context
        ("Mistral", {"sliding_window": None}, ()),
        ("Mixtral", MIXTRAL | {"sliding_window": 64}, (64, 64)),
        ("Llama", {"sliding_window": 64}, ()),
        ("Qwen2", {"sliding_window": 64}, ()),
        ("Qwen2", QWEN_WINDOW, ()),
        ("Qwen2", QWEN_WINDOW | {"max_window_layers": 1}, (None, 64)),
        ("Qwen3", QWEN_WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}, (64, None)),
        ("Qwen3", QWEN_WINDOW | {"layer_types": ["full_attention", "full_attention"]}, ()),
        ("Qwen3Moe", QWEN3_MOE | QWEN_WINDOW, (64, 64)),
        ("Qwen3Moe", QWEN3_MOE | {"sliding_window": 64}, ()),
    ],
)
def test_a_window_is_in_the_layers_that_the_family_means(
    folder: Path, family: str, written: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    config = read_hf_config(write(folder, architectures=[f"{family}ForCausalLM"], **written))
    assert config.windows == windows
    assert [config.window(layer) for layer in range(2)] == list(windows or (None, None))


@pytest.mark.parametrize(
    ("family", "written", "experts"),
    [
        ("Mixtral", MIXTRAL, ExpertsConfig(8, 2, 96, True)),
        ("Qwen3Moe", QWEN3_MOE, ExpertsConfig(16, 4, 32, False)),
        ("Qwen3Moe", QWEN3_MOE | {"norm_topk_prob": True}, ExpertsConfig(16, 4, 32, True)),
        ("Qwen3Moe", QWEN3_MOE | {"num_experts": None, "num_local_experts": 4}, ExpertsConfig(4, 4, 32, False)),
        ("Qwen3Moe", QWEN3_MOE | {"mlp_only_layers": [1]}, ExpertsConfig(16, 4, 32, False, dense_layers=(1,))),
        ("Qwen3Moe", QWEN3_MOE | {"decoder_sparse_step": 2}, ExpertsConfig(16, 4, 32, False, dense_layers=(0,))),
    ],
)
def test_experts_are_read_as_the_family_spells_them(
    folder: Path, family: str, written: dict[str, Any], experts: ExpertsConfig
) -> None:
    config = read_hf_config(write(folder, architectures=[f"{family}ForCausalLM"], **written))
    assert config.experts == experts
    assert [config.experts_in(layer) is None for layer in range(2)] == [i in experts.dense_layers for i in range(2)]


def test_only_what_differs_from_a_default_is_part_of_the_fingerprint(folder: Path) -> None:
    plain = read_hf_config(write(folder))
    assert plain.describe().endswith("max_position_embeddings=128, eos_token_ids=())")
    others = [
        replace(plain, qk_norm=True),
        replace(plain, windows=(64, None)),
        replace(plain, windows=(64, 64)),
        replace(plain, experts=ExpertsConfig(8, 2, 96, True)),
        replace(plain, experts=ExpertsConfig(8, 2, 96, False)),
    ]
    assert len({config.describe() for config in [plain, *others]}) == 1 + len(others)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "supported are LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, Mix",
        ),
        ({"architectures": None}, "architectures is None"),
        ({"architectures": [["LlamaForCausalLM"]]}, "supported are LlamaForCausalLM"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window is 0"),
        ({"architectures": ["Qwen2ForCausalLM"], **QWEN_WINDOW, "layer_types": ["full_attention"]}, "layer_types"),
        (
            {"architectures": ["Qwen3ForCausalLM"], **QWEN_WINDOW, "layer_types": [{}, "conv"]},
            "layer_types .* 2 layers",
        ),
        ({"architectures": ["MixtralForCausalLM"], "num_experts_per_tok": 2}, "num_local_experts is missing"),
        ({"architectures": ["MixtralForCausalLM"], **MIXTRAL, "num_experts_per_tok": 9}, "9 of 8 experts"),
        ({"architectures": ["MixtralForCausalLM"], **MIXTRAL, "intermediate_size": 90}, "multiples of 8"),
        ({"architectures": ["Qwen3MoeForCausalLM"], **QWEN3_MOE, "num_experts": "8"}, "num_local_experts is '8'"),
        ({"architectures": ["Qwen3MoeForCausalLM"], **QWEN3_MOE, "mlp_only_layers": 1}, "mlp_only_layers is 1"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised safetensors"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rotary scaling 'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor is missing"),
        ({"rope_scaling": [1]}, "rope_scaling is \\[1\\]"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": 1 << 40}, "at most 4096"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
    ],
)
def test_what_is_malformed_or_unsupported_is_named(folder: Path, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint) as caught:
        read_hf_config(write(folder, **changes))
    assert str(folder / "config.json") in str(caught.value)


@pytest.mark.parametrize("content", ["", "{", "[1]", "nul", "[" * 5000])
def test_a_config_that_is_no_json_object_is_a_model_error(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_hf_config(folder)
