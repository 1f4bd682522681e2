"""Host values to the device without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor


def upload(values: Seq[int] | Seq[float] | Seq[Seq[int]], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of these values on the device.

    To a GPU it goes from pinned memory in the stream's order; torch's allocator keeps that memory until it has gone.
    """
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
