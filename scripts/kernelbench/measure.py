"""Times, taken in turns: what disturbs the machine then disturbs everything alike, and the best of many is kept."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.native.kernels import NativeKernels
from kernelbench.workloads import Workload

READ_BYTES = 256 << 20
MULTIPLY_COUNT = 200_000
MAX_S = 3.0  # on one workload; slow ones are then repeated less often, but at least three times


@dataclass(frozen=True)
class Limits:
    """What the machine does at best, with the same number of threads."""

    read_bytes_per_s: float
    operations_per_s: float

    def seconds(self, workload: Workload) -> float:
        return max(workload.num_bytes / self.read_bytes_per_s, workload.num_operations / self.operations_per_s)


@dataclass(frozen=True)
class Measured:
    workload: Workload
    native_s: float
    torch_s: float


def measure(workload: Workload, repeats: int) -> Measured:
    native, in_torch = _best_of(repeats, workload.native, workload.in_torch)
    return Measured(workload, native, in_torch)


class LimitProbe:
    """Asked again between the workloads; the best answer counts."""

    def __init__(self, kernels: NativeKernels) -> None:
        self._kernels = kernels
        self._data = torch.ones(READ_BYTES, dtype=torch.uint8)
        self._read_s, self._multiply_s = float("inf"), float("inf")

    def run(self, repeats: int) -> None:
        read_s, multiply_s = _best_of(
            repeats,
            lambda: self._kernels.read_memory(self._data),
            lambda: self._kernels.multiply_registers(MULTIPLY_COUNT),
        )
        self._read_s, self._multiply_s = min(self._read_s, read_s), min(self._multiply_s, multiply_s)

    @property
    def limits(self) -> Limits:
        num_operations = MULTIPLY_COUNT * self._kernels.operations_per_count
        return Limits(READ_BYTES / self._read_s, num_operations / self._multiply_s)


def _best_of(repeats: int, first: Callable[[], object], second: Callable[[], object]) -> tuple[float, float]:
    first_s, second_s = float("inf"), float("inf")
    deadline = time.perf_counter() + MAX_S
    for done in range(repeats):
        if done >= 3 and time.perf_counter() > deadline:
            break
        first_s, second_s = min(first_s, _seconds(first)), min(second_s, _seconds(second))
    return first_s, second_s


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
