"""What this machine can do at best with a number of threads, asked again in every pass."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

from engine.native.kernels import NativeKernels
from enginebench.threads import torch_threads
from kernelbench.measure import READ_BYTES, LimitProbe, Limits

MATRIX_SIZE = 1024


class Probe(Protocol):
    @property
    def limits(self) -> Limits:
        """The best of all runs so far."""

    def run(self, repeats: int) -> None: ...


def probe_for(kernels: NativeKernels | None, dtype: torch.dtype, num_threads: int) -> Probe:
    """The kernels' own loops tell the truth; torch's, where there are none for this dtype, only come near it."""
    if kernels is not None and dtype == torch.bfloat16:
        return LimitProbe(kernels)
    return TorchProbe(dtype, num_threads)


class TorchProbe:
    def __init__(self, dtype: torch.dtype, num_threads: int) -> None:
        self._num_threads = num_threads
        self._data = torch.ones(READ_BYTES // 4)
        self._matrix = torch.ones(MATRIX_SIZE, MATRIX_SIZE, dtype=dtype)
        self._read_s, self._multiply_s = float("inf"), float("inf")

    def run(self, repeats: int) -> None:
        with torch_threads(self._num_threads):
            for _ in range(repeats):
                self._read_s = min(self._read_s, _seconds(self._data.sum))
                self._multiply_s = min(self._multiply_s, _seconds(lambda: self._matrix @ self._matrix))

    @property
    def limits(self) -> Limits:
        return Limits(READ_BYTES / self._read_s, 2 * MATRIX_SIZE**3 / self._multiply_s)


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
