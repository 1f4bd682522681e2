from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HeadRange:
    """KV heads [start, end) of the model."""

    start: int
    end: int
