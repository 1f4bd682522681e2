"""What an engine is told at start. Plain dataclasses: the engine runs where pydantic is not installed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class EngineConfig:
    model_path: Path  # a Hugging Face folder or a .gguf file
    dtype: str = "auto"  # "auto", "float32", "bfloat16", "float16"
    device: str = "auto"  # "auto", "cpu", "cuda", "cuda:N"
    attention: str = "auto"  # "auto", "torch_reference", "cpu", "flash"
    num_threads: int | None = None  # of torch's own pool; None leaves torch's default
    block_size: int | None = None  # tokens; None: by device
    kv_cache_bytes: int = 1 << 30
    max_num_batched_tokens: int | None = None  # tokens per step; None: by device
    max_num_seqs: int = 64  # sequences per step
    max_model_len: int | None = None  # tokens, prompt and answer; None: the model's own
