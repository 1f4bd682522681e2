"""Whether this machine can have the kernels."""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path

import torch

from engine.native.abi import open_library
from engine.native.build import BuildFailed, build_library, default_cache
from engine.native.kernels import NativeKernels

logger = logging.getLogger(__name__)


def load_native(num_threads: int, cache: Path | None = None) -> NativeKernels | None:
    """The kernels with a thread pool of their own, or None, with one logged line of why, once for each cache folder.

    The first call on a machine compiles for some seconds. cache: where to keep the result; None: the user's.
    """
    library = _library(default_cache() if cache is None else cache)
    return None if library is None else NativeKernels(library, num_threads)


@functools.cache
def _library(cache: Path) -> ctypes.CDLL | None:
    capabilities = torch.cpu.get_capabilities()
    if not all(capabilities.get(name, False) for name in ("avx512_bf16", "avx512_vbmi")):
        logger.info("native kernels are off: this CPU has not both AVX512-BF16 and AVX512-VBMI")
        return None
    try:
        return open_library(build_library(cache))
    except (BuildFailed, OSError) as error:
        logger.warning("native kernels are off: %s", error)
        return None
