"""The kernels as this machine has them, once with one thread and once with two."""

from __future__ import annotations

import pytest
from engine.native.kernels import NativeKernels
from engine.native.load import load_native


@pytest.fixture(scope="session")
def one_thread() -> NativeKernels:
    return _require(load_native(1))


@pytest.fixture(scope="session")
def two_threads() -> NativeKernels:
    return _require(load_native(2))


def _require(kernels: NativeKernels | None) -> NativeKernels:
    if kernels is None:
        pytest.skip("this machine has no AVX512-BF16 or no C++ compiler")
    return kernels
