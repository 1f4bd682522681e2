"""The checksum of every piece and commit: xxh3 where the package xxhash is, else the fastest that Python itself has.

Both ends of a link must use the same one, so its name is part of the handshake.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Checksum:
    """Guards against damage, not against forgery."""

    name: str  # as in LinkHello
    of: Callable[[bytes | memoryview], int]  # fits 64 bits, whatever it has of them


def _fastest() -> Checksum:
    try:
        from xxhash import xxh3_64_intdigest
    except ImportError:  # a GPU image that holds only what computes
        return Checksum("crc32", zlib.crc32)  # a few GB/s
    return Checksum("xxh3-64", xxh3_64_intdigest)  # tens of GB/s


CHECKSUM = _fastest()
