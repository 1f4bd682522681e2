"""All families, and which of them a file belongs to."""

from __future__ import annotations

from common.errors import ModelError
from engine.model.families.family import Family
from engine.model.families.llama import LLAMA
from engine.model.families.mistral import MISTRAL
from engine.model.families.mixtral import MIXTRAL
from engine.model.families.qwen2 import QWEN2
from engine.model.families.qwen3 import QWEN3
from engine.model.families.qwen3_moe import QWEN3_MOE

FAMILIES = (LLAMA, MISTRAL, QWEN2, QWEN3, MIXTRAL, QWEN3_MOE)


def find_hf_family(architectures: object, source: str) -> Family:
    """The family of one of config.json's architectures. Raises: ModelError."""
    for name in architectures if isinstance(architectures, list) else []:
        for family in FAMILIES:
            if family.hf_architecture == name:
                return family
    supported = ", ".join(family.hf_architecture for family in FAMILIES)
    raise ModelError(f"{source}: architectures is {architectures!r}; supported are {supported}")


def find_gguf_family(architecture: object, source: str) -> Family:
    """Raises: ModelError."""
    for family in FAMILIES:
        if family.gguf_architecture is not None and family.gguf_architecture == architecture:
            return family
    supported = ", ".join(family.gguf_architecture for family in FAMILIES if family.gguf_architecture is not None)
    raise ModelError(f"{source}: general.architecture is {architecture!r}; supported are {supported}")
