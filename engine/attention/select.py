"""Which attention backend a name from the configuration means on this device."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch

from common.errors import ConfigError
from engine.attention.base import AttentionBackend
from engine.attention.cpu import CpuAttention
from engine.attention.torch_reference import TorchReferenceAttention

# Those that read a step's lengths on the device alone, so that a CUDA graph of one step serves every later one.
CAPTURABLE = frozenset({"flash", "triton"})

BACKENDS: dict[str, Callable[[torch.device], AttentionBackend]] = {
    "torch_reference": lambda device: TorchReferenceAttention(),
    "cpu": CpuAttention,
    "flash": lambda device: _flash(device),
    "triton": lambda device: _triton(device),
}


def select_attention(name: str, device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    """ "native" is not chosen here: it is the whole model's, see engine/build.py.

    Raises: ConfigError when there is no such backend or it does not run on this device in this dtype.
    """
    if name == "auto":
        name = _best(device, dtype)
    if name == "flash" and dtype == torch.float32:
        raise ConfigError("flash attention computes in bfloat16 or float16; set attention: triton for float32")
    if name not in BACKENDS:
        raise ConfigError(f"unknown attention backend {name!r}; it may be auto, native, {', '.join(BACKENDS)}")
    return BACKENDS[name](device)


def _best(device: torch.device, dtype: torch.dtype) -> str:
    if device.type != "cuda":
        return "cpu"
    from engine.attention.flash import runs_on

    if dtype != torch.float32 and runs_on(device):
        return "flash"
    return "torch_reference" if find_spec("triton") is None else "triton"


# What follows imports libraries that take long to load and that a CPU worker never needs.


def _flash(device: torch.device) -> AttentionBackend:
    from engine.attention.flash import FlashAttention

    return FlashAttention(device)


def _triton(device: torch.device) -> AttentionBackend:
    if find_spec("triton") is None:
        raise ConfigError("attention backend 'triton' needs the package triton: pip install 'pdserve[triton]'")
    from engine.attention.triton_paged import TritonAttention

    return TritonAttention(device)
