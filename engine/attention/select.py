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


def select_attention(name: str, device: torch.device) -> AttentionBackend:
    """Raises: ConfigError when there is no such backend or it does not run on this device."""
    if name == "auto":
        name = "flash" if device.type == "cuda" else "cpu"
    if name not in BACKENDS:
        raise ConfigError(f"unknown attention backend {name!r}; it may be auto, {', '.join(BACKENDS)}")
    return BACKENDS[name](device)
