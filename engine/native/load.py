"""Whether this machine can have the kernels."""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path

import torch

from engine.native.abi import open_library
from engine.native.build import BuildFailed, build_library, compile_library, default_cache
from engine.native.kernels import NativeKernels

logger = logging.getLogger(__name__)

NO_INSTRUCTIONS = "this CPU has not both AVX512-BF16 and AVX512-VBMI"


class NoKernels(Exception):
    """This machine cannot have them; the message says why."""


def load_native(num_threads: int, cache: Path | None = None) -> NativeKernels | None:
    """The kernels with a thread pool of their own, or None, with one logged line of why, once for each cache folder.

    The first call on a machine compiles for some seconds. cache: where to keep the result; None: the user's.
    """
    try:
        return require_native(num_threads, cache)
    except NoKernels as error:
        _log_once(str(error), cache)
        return None


def require_native(num_threads: int, cache: Path | None = None) -> NativeKernels:
    """As load_native. Raises: NoKernels."""
    library = _library(cache)
    if isinstance(library, str):
        raise NoKernels(library)
    return NativeKernels(library, num_threads)


@functools.cache
def _log_once(reason: str, cache: Path | None) -> None:
    level = logging.INFO if reason == NO_INSTRUCTIONS else logging.WARNING  # the former is nothing to see to
    logger.log(level, "native kernels are off: %s", reason)


@functools.cache
def _library(cache: Path | None) -> ctypes.CDLL | str:
    """Or why there is none: found out once."""
    capabilities = torch.cpu.get_capabilities()
    if not all(capabilities.get(name, False) for name in ("avx512_bf16", "avx512_vbmi")):
        return NO_INSTRUCTIONS
    try:
        return _open(default_cache() if cache is None else cache)
    except (BuildFailed, OSError, AttributeError) as error:
        return str(error)


def _open(cache: Path) -> ctypes.CDLL:
    """A library that cannot be loaded here was made for another system, or is none of ours: there is one more try.

    Raises: BuildFailed, OSError, AttributeError.
    """
    library = build_library(cache)
    try:
        return open_library(library)
    except (OSError, AttributeError) as error:
        logger.info("%s cannot be loaded (%s); compiling it anew", library, error)
    compiled = compile_library(cache)
    if compiled != library:
        library.unlink(missing_ok=True)
    return open_library(compiled)
