"""Qwen3-MoE: a Qwen3 whose MLPs, all or some of them, are mixtures of many small experts."""

from __future__ import annotations

from dataclasses import replace

from common.errors import ModelError
from engine.model.config import ExpertsConfig, ModelConfig
from engine.model.families.family import Family
from engine.model.families.windows import window_in_all_layers
from engine.model.fields import Fields


def _read_hf(fields: Fields, config: ModelConfig) -> ModelConfig:
    experts = ExpertsConfig(
        num_experts=fields.positive_int("num_local_experts", fields.get("num_experts")),  # new and old spelling
        num_active=fields.positive_int("num_experts_per_tok"),
        intermediate_size=fields.positive_int("moe_intermediate_size"),
        is_renormalised=fields.boolean("norm_topk_prob", False),
        dense_layers=_dense_layers(fields, config.num_layers),
    )
    has_window = fields.boolean("use_sliding_window", False)
    return replace(config, experts=experts, windows=window_in_all_layers(fields, config) if has_window else ())


def _dense_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    listed = fields.get("mlp_only_layers", [])
    if not isinstance(listed, list):
        raise ModelError(f"{fields.source}: mlp_only_layers is {listed!r}; it must be a list of layers")
    step = fields.positive_int("decoder_sparse_step", 1)  # experts in every step-th layer
    return tuple(layer for layer in range(num_layers) if layer in listed or (layer + 1) % step)


QWEN3_MOE = Family(hf_architecture="Qwen3MoeForCausalLM", gguf_architecture="qwen3moe", qk_norm=True, read_hf=_read_hf)
