"""What `auto` means for device and dtype."""

from __future__ import annotations

import torch

from common.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(name: str) -> torch.device:
    """The device of that name; for "auto", CUDA where there is one, else the CPU.

    Raises: ConfigError for a device that is unknown or not present.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {name!r}; it may be auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not supported; it may be auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {name!r} is not present: this machine has {torch.cuda.device_count()} CUDA devices")
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of that name; for "auto", bfloat16 where the hardware multiplies it natively, else float32.

    Raises: ConfigError for an unknown name.
    """
    if name == "auto":
        return torch.bfloat16 if _multiplies_bfloat16(device) else torch.float32
    if name not in DTYPES:
        raise ConfigError(f"unknown dtype {name!r}; it may be auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def _multiplies_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))
