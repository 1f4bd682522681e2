"""Qwen2 and 2.5: a Llama with biases on q, k and v, and a window in the upper layers where the file turns it on."""

from __future__ import annotations

from dataclasses import replace

from engine.model.config import ModelConfig
from engine.model.families.family import Family
from engine.model.families.windows import window_in_some_layers
from engine.model.fields import Fields


def _read_hf(fields: Fields, config: ModelConfig) -> ModelConfig:
    windows = window_in_some_layers(fields, config)
    return replace(config, attention_bias=True, attention_output_bias=False, windows=windows)


QWEN2 = Family(hf_architecture="Qwen2ForCausalLM", gguf_architecture="qwen2", read_hf=_read_hf)
