"""Mixtral: a Mistral whose every MLP is a mixture of experts."""

from __future__ import annotations

from dataclasses import replace

from engine.model.config import ExpertsConfig, ModelConfig
from engine.model.families.family import Family
from engine.model.families.windows import window_in_all_layers
from engine.model.fields import Fields


def _read_hf(fields: Fields, config: ModelConfig) -> ModelConfig:
    experts = ExpertsConfig(
        num_experts=fields.positive_int("num_local_experts"),
        num_active=fields.positive_int("num_experts_per_tok"),
        intermediate_size=config.intermediate_size,
        is_renormalised=True,
    )
    return replace(config, experts=experts, windows=window_in_all_layers(fields, config))


MIXTRAL = Family(
    hf_architecture="MixtralForCausalLM",
    read_hf=_read_hf,
    hf_names={
        "model.layers.{}.mlp.gate": "model.layers.{}.block_sparse_moe.gate",
        "model.layers.{}.mlp.experts.{}.gate_proj": "model.layers.{}.block_sparse_moe.experts.{}.w1",
        "model.layers.{}.mlp.experts.{}.up_proj": "model.layers.{}.block_sparse_moe.experts.{}.w3",
        "model.layers.{}.mlp.experts.{}.down_proj": "model.layers.{}.block_sparse_moe.experts.{}.w2",
    },
)
