"""How much memory the KV cache gets."""

from __future__ import annotations

from collections.abc import Callable

import torch

from common.engine_config import EngineConfig

DEFAULT_CPU_BYTES = 1 << 30


def free_cuda_bytes(device: torch.device) -> int:
    """What the driver could still give out on this GPU, whoever uses the rest."""
    with torch.cuda.device(device):
        torch.cuda.empty_cache()  # what loading the weights left over in torch's own pool
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return free_bytes


def kv_cache_bytes(
    config: EngineConfig, device: torch.device, free_bytes: Callable[[torch.device], int] = free_cuda_bytes
) -> int:
    """What the configuration says; else on a GPU its share of what is free now that the weights are loaded.

    The rest is for a step's intermediate results.
    """
    if config.kv_cache_bytes is not None:
        return config.kv_cache_bytes
    if device.type != "cuda":
        return DEFAULT_CPU_BYTES
    return int(free_bytes(device) * config.gpu_memory_fraction)
