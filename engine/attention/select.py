"""Which attention backend a name from the configuration means on this device."""

from __future__ import annotations

from collections.abc import Callable

import torch

from common.errors import ConfigError
from engine.attention.base import AttentionBackend
from engine.attention.cpu import CpuAttention
from engine.attention.flash import FlashAttention
from engine.attention.torch_reference import TorchReferenceAttention

BACKENDS: dict[str, Callable[[torch.device], AttentionBackend]] = {
    "torch_reference": lambda device: TorchReferenceAttention(),
    "cpu": CpuAttention,
    "flash": FlashAttention,
}


def select_attention(name: str, device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    """Raises: ConfigError when there is no such backend or it does not run on this device in this dtype."""
    if name == "auto":
        name = _best(device, dtype)
    if name == "flash" and dtype == torch.float32:
        raise ConfigError("flash attention computes in bfloat16 or float16; set attention: torch_reference for float32")
    if name not in BACKENDS:
        raise ConfigError(f"unknown attention backend {name!r}; it may be auto, {', '.join(BACKENDS)}")
    return BACKENDS[name](device)


def _best(device: torch.device, dtype: torch.dtype) -> str:
    if device.type != "cuda":
        return "cpu"
    return "torch_reference" if dtype == torch.float32 else "flash"
