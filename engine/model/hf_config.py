"""ModelConfig from a Hugging Face folder: config.json, and generation_config.json for the ids that end an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common.errors import ModelError
from engine.model.config import MAX_LAYERS, Llama3Scaling, ModelConfig, RopeConfig, check_config
from engine.model.families.catalog import find_hf_family
from engine.model.families.family import Family
from engine.model.fields import Fields


def read_hf_family(folder: Path) -> Family:
    """Raises: ModelError when config.json names no supported one."""
    path = folder / "config.json"
    return find_hf_family(read_json_object(path).get("architectures"), str(path))


def read_hf_config(folder: Path) -> ModelConfig:
    """Raises: ModelError naming the file and the key that is missing, malformed or not supported."""
    family = read_hf_family(folder)
    path = folder / "config.json"
    fields = Fields(read_json_object(path), source=str(path))
    _refuse_unsupported(fields, path)

    num_heads = fields.positive_int("num_attention_heads")
    hidden_size = fields.positive_int("hidden_size")
    has_bias = fields.boolean("attention_bias", False)
    config = ModelConfig(
        vocab_size=fields.positive_int("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.positive_int("intermediate_size"),
        num_layers=fields.positive_int("num_hidden_layers", at_most=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=fields.positive_int("num_key_value_heads", num_heads),
        head_dim=fields.positive_int("head_dim", max(1, hidden_size // num_heads)),
        rms_norm_eps=fields.positive_float("rms_norm_eps", 1e-6),
        rope=_rope(fields, path),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        attention_bias=has_bias,
        attention_output_bias=has_bias,
        max_position_embeddings=fields.positive_int("max_position_embeddings"),
        eos_token_ids=_eos_token_ids(folder, fields),
        qk_norm=family.qk_norm,
    )
    config = family.read_hf(fields, config)
    check_config(config, str(path))
    return config


def read_json_object(path: Path) -> dict[str, Any]:
    """Raises: ModelError."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing: model.source must be a complete Hugging Face folder") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {path}: {error}; fetch the model again") from error
    if not isinstance(tree, dict):
        raise ModelError(f"{path} must hold a JSON object, not a {type(tree).__name__}; fetch the model again")
    return tree


def _refuse_unsupported(fields: Fields, path: Path) -> None:
    if fields.get("quantization_config") is not None:
        raise ModelError(f"{path}: quantised safetensors are not supported; use the unquantised model or a .gguf file")
    if fields.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{path}: hidden_act is {fields.get('hidden_act')!r}; only 'silu' is supported")
    if fields.boolean("mlp_bias", False):
        raise ModelError(f"{path}: mlp_bias is not supported")


def _rope(fields: Fields, path: Path) -> RopeConfig:
    """transformers 5 writes one `rope_parameters`; older files have `rope_theta` and perhaps `rope_scaling`."""
    scaling = fields.section("rope_parameters") or fields.section("rope_scaling")
    theta = scaling.positive_float("rope_theta", fields.positive_float("rope_theta", 10000.0))
    if scaling.get("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError(f"{path}: partial_rotary_factor is not supported")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, linear_factor=scaling.positive_float("factor"))
    if kind == "llama3":
        return RopeConfig(
            theta,
            llama3=Llama3Scaling(
                factor=scaling.positive_float("factor"),
                low_freq_factor=scaling.positive_float("low_freq_factor"),
                high_freq_factor=scaling.positive_float("high_freq_factor"),
                original_max_position_embeddings=scaling.positive_int("original_max_position_embeddings"),
            ),
        )
    raise ModelError(f"{path}: rotary scaling {kind!r} is not supported; supported are default, linear and llama3")


def _eos_token_ids(folder: Path, fields: Fields) -> tuple[int, ...]:
    found = _as_ids(fields.get("eos_token_id"), folder / "config.json")
    path = folder / "generation_config.json"
    if path.exists():
        found = _as_ids(read_json_object(path).get("eos_token_id"), path) + found
    return tuple(dict.fromkeys(found))


def _as_ids(value: object, path: Path) -> list[int]:
    if value is None:
        return []
    listed = value if isinstance(value, list) else [value]
    ids = [token_id for token_id in listed if type(token_id) is int]
    if len(ids) != len(listed):
        raise ModelError(f"{path}: eos_token_id is {value!r}; it must be a token id or a list of them")
    return ids
