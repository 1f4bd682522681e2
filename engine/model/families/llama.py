"""Llama 2 and 3, and what all other families are described against.

GGUF files of Mistral and Mixtral say "llama" too: there a window and experts are in the metadata (gguf_config.py).
"""

from __future__ import annotations

from engine.model.families.family import Family

LLAMA = Family(hf_architecture="LlamaForCausalLM", gguf_architecture="llama", gguf_permutes_heads=True)
