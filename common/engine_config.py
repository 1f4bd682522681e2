"""What an engine is told at start. Plain dataclasses: the engine runs where pydantic is not installed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class EngineConfig:
    model_path: Path  # a Hugging Face folder or a .gguf file
    dtype: str = "auto"  # "auto", "float32", "bfloat16", "float16"
    device: str = "auto"  # "auto", "cpu", "cuda", "cuda:N"
    attention: str = "auto"  # "auto", "native", "cpu", "flash", "triton", "torch_reference"
    quantization: str = "none"  # or "int8", of the weights
    num_threads: int | None = None  # of torch's own pool; None leaves torch's default
    block_size: int | None = None  # tokens; None: by device
    kv_cache_bytes: int | None = None  # None: 1 GiB on a CPU, gpu_memory_fraction on a GPU
    gpu_memory_fraction: float = 0.9  # of the GPU memory that is free once the weights are loaded
    max_num_batched_tokens: int | None = None  # tokens per step; None: by device
    tpot_goal_s: float | None = None  # prompts are cut so that steps beside running streams take no longer
    max_num_seqs: int = 64  # sequences per step
    max_model_len: int | None = None  # tokens, prompt and answer; None: the model's own
