"""ModelConfig from a GGUF file's metadata, whose keys are the same for all families."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from common.errors import ModelError
from engine.model.config import MAX_LAYERS, ExpertsConfig, ModelConfig, RopeConfig, check_config
from engine.model.families.catalog import find_gguf_family
from engine.model.families.windows import window_in_all_layers
from engine.model.fields import Fields
from engine.model.gguf_file import GGUFFile, GGUFTensorInfo

EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def read_gguf_config(file: GGUFFile) -> ModelConfig:
    """Raises: ModelError naming the file and the key that is missing, malformed or not supported."""
    source = str(file.path)
    family = find_gguf_family(file.metadata.get("general.architecture"), source)
    fields = Fields(file.metadata, source, prefix=f"{family.gguf_architecture}.")

    num_heads = fields.positive_int("attention.head_count")
    hidden_size = fields.positive_int("embedding_length")
    head_dim = fields.positive_int("attention.key_length", max(1, hidden_size // num_heads))
    if fields.positive_int("rope.dimension_count", head_dim) != head_dim:
        raise ModelError(f"{source}: rotary embedding of only a part of each head is not supported")
    config = ModelConfig(
        vocab_size=_vocab_size(file),
        hidden_size=hidden_size,
        intermediate_size=fields.positive_int("feed_forward_length"),
        num_layers=fields.positive_int("block_count", at_most=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=fields.positive_int("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=fields.positive_float("attention.layer_norm_rms_epsilon"),
        rope=_rope(file, fields),
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        attention_output_bias="blk.0.attn_output.bias" in file.tensors,
        max_position_embeddings=fields.positive_int("context_length"),
        eos_token_ids=_eos_token_ids(file),
        qk_norm=family.qk_norm,
        experts=_experts(fields),
    )
    if fields.get("attention.sliding_window", 0):
        config = replace(config, windows=window_in_all_layers(fields, config, "attention.sliding_window"))
    check_config(config, source)
    return config


def _vocab_size(file: GGUFFile) -> int:
    """From the embedding itself: the metadata key is optional."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path} has no tensor token_embd.weight; fetch the model again")
    return embedding.shape[0]


def _rope(file: GGUFFile, fields: Fields) -> RopeConfig:
    theta = fields.positive_float("rope.freq_base", 10000.0)
    divisors = file.tensors.get("rope_freqs.weight")  # Llama-3 scaling, already worked out by the converter
    if divisors is not None:
        return RopeConfig(theta, frequency_divisors=_positive_floats(file, divisors))
    kind = fields.get("rope.scaling.type", "none")
    if kind == "none":
        return RopeConfig(theta, linear_factor=fields.positive_float("rope.scale_linear", 1.0))
    if kind == "linear":
        return RopeConfig(theta, linear_factor=fields.positive_float("rope.scaling.factor"))
    raise ModelError(f"{file.path}: rotary scaling {kind!r} is not supported; supported are none and linear")


def _experts(fields: Fields) -> ExpertsConfig | None:
    if not fields.get("expert_count", 0):
        return None
    return ExpertsConfig(
        num_experts=fields.positive_int("expert_count"),
        num_active=fields.positive_int("expert_used_count"),
        intermediate_size=fields.positive_int("expert_feed_forward_length", fields.get("feed_forward_length")),
        is_renormalised=fields.boolean("expert_weights_norm", True),  # unsaid for Mixtral and Qwen3-MoE, whose are
    )


def _positive_floats(file: GGUFFile, tensor: GGUFTensorInfo) -> tuple[float, ...]:
    values = dequantize(tensor.data, tensor.kind) if tensor.kind == GGMLQuantizationType.F32 else np.zeros(1)
    if not (np.isfinite(values).all() and (values > 0).all()):
        raise ModelError(f"{file.path}: {tensor.name} must hold float32 numbers above 0; fetch the model again")
    return tuple(values.reshape(-1).tolist())


def _eos_token_ids(file: GGUFFile) -> tuple[int, ...]:
    found = (file.metadata.get(f"tokenizer.ggml.{key}") for key in EOS_KEYS)
    return tuple(dict.fromkeys(token_id for token_id in found if type(token_id) is int))
