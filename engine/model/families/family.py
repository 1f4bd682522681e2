"""What makes a model family one: the facts that its files leave unsaid, and how to read those they state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from engine.model.config import ModelConfig
from engine.model.fields import Fields


def as_llama(_fields: Fields, config: ModelConfig) -> ModelConfig:
    return config


@dataclass(frozen=True)
class Family:
    """How a family's files are recognised and read.

    Everywhere else in the engine a weight has one name, whatever the family: the one in Hugging Face folders of Llama,
    and for what Llama lacks, of Qwen3 and Qwen3-MoE.
    """

    hf_architecture: str  # in config.json's "architectures"
    gguf_architecture: str | None = None  # "general.architecture"; None: such files go by another family's
    qk_norm: bool = False  # RMSNorm over each head of q and k
    # The fields of config.json, and a Llama of the sizes they state; gives the model that they mean in this family.
    read_hf: Callable[[Fields, ModelConfig], ModelConfig] = as_llama
    # The engine's name -> the name in safetensors files, where it differs; {} is the layer, then the expert.
    hf_names: Mapping[str, str] = field(default_factory=dict)
    gguf_permutes_heads: bool = False  # llama.cpp's converter reorders the rows of q and k
