"""Mistral: a Llama that in its first version sees only a window of the latest tokens."""

from __future__ import annotations

from dataclasses import replace

from engine.model.config import ModelConfig
from engine.model.families.family import Family
from engine.model.families.windows import window_in_all_layers
from engine.model.fields import Fields


def _read_hf(fields: Fields, config: ModelConfig) -> ModelConfig:
    return replace(config, windows=window_in_all_layers(fields, config))


MISTRAL = Family(hf_architecture="MistralForCausalLM", read_hf=_read_hf)
