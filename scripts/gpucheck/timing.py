"""How long device work takes, and the two limits of a device that everything else is measured against."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from gpucheck.figures import Figure, plain


@dataclass(frozen=True)
class Limits:
    """What this device really does, not what its data sheet says."""

    read_bytes_per_s: float
    flops_per_s: float

    def figures(self) -> Iterator[Figure]:
        yield plain("limit_memory_read", self.read_bytes_per_s / 1e9, "GB/s")
        yield plain("limit_matrix_bf16", self.flops_per_s / 1e12, "TFLOP/s")


def measure_limits(device: torch.device, *, num_bytes: int, matrix_size: int) -> Limits:
    read_s = median_s(torch.zeros(num_bytes // 4, device=device).sum, device, repeats=10)
    a, b = (torch.randn(matrix_size, matrix_size, device=device).bfloat16() for _ in range(2))
    multiply_s = median_s(lambda: a @ b, device, repeats=10)
    return Limits(num_bytes / read_s, 2 * matrix_size**3 / multiply_s)


def median_s(run: Callable[[], object], device: torch.device, *, repeats: int) -> float:
    """After two runs that do not count."""
    times: list[float] = []
    for _ in range(repeats + 2):
        synchronize(device)
        start_s = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - start_s)
    return statistics.median(times[2:])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
