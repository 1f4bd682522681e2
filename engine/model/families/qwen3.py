"""Qwen3: each head of q and k is normalised before it is turned; windows as in Qwen2."""

from __future__ import annotations

from dataclasses import replace

from engine.model.config import ModelConfig
from engine.model.families.family import Family
from engine.model.families.windows import window_in_some_layers
from engine.model.fields import Fields

DEFAULT_HEAD_DIM = 128  # whatever the hidden size


def _read_hf(fields: Fields, config: ModelConfig) -> ModelConfig:
    head_dim = fields.positive_int("head_dim", DEFAULT_HEAD_DIM)
    return replace(config, head_dim=head_dim, windows=window_in_some_layers(fields, config))


QWEN3 = Family(hf_architecture="Qwen3ForCausalLM", gguf_architecture="qwen3", qk_norm=True, read_hf=_read_hf)
