"""Device values to the host, with other work done while they are on their way."""

from __future__ import annotations

import torch
from torch import Tensor


class Download:
    """From a GPU the copy is queued behind what computes the values; only `tolist` waits. On a CPU they are here."""

    def __init__(self, values: Tensor) -> None:
        self._host = values
        self._has_arrived: torch.cuda.Event | None = None
        if values.device.type == "cuda":
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._has_arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._has_arrived.record(torch.cuda.current_stream(values.device))

    def tolist(self) -> list[int]:
        if self._has_arrived is not None:
            self._has_arrived.synchronize()
        values: list[int] = self._host.tolist()
        return values
