"""Typed reading of a model file's own description of itself, which may say anything."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.errors import ModelError


@dataclass(frozen=True)
class Fields:
    """Keys and values of config.json or of GGUF metadata; a null value counts as absent.

    Every method raises ModelError naming source and key when a value is absent without a default, or malformed.
    """

    values: Mapping[str, Any]
    source: str
    prefix: str = ""  # put before each key: GGUF names its keys "llama.block_count"

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(self.prefix + key)
        return default if value is None else value

    def positive_int(self, key: str, default: int | None = None, at_most: int | None = None) -> int:
        value = self.get(key, default)
        if type(value) is not int or value < 1:
            raise self._malformed(key, value, "a whole number above 0")
        if at_most is not None and value > at_most:
            raise self._malformed(key, value, f"at most {at_most}")
        return value

    def positive_float(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise self._malformed(key, value, "a number above 0")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if type(value) is not bool:
            raise self._malformed(key, value, "true or false")
        return value

    def section(self, key: str) -> Fields:
        """The keys below `key`; empty (and false) where it is absent."""
        value = self.get(key, {})
        if not isinstance(value, dict):
            raise self._malformed(key, value, "an object")
        return Fields(value, f"{self.source}: {key}")

    def __bool__(self) -> bool:
        return bool(self.values)

    def _malformed(self, key: str, value: object, wanted: str) -> ModelError:
        found = "missing" if value is None else f"{value!r}"
        return ModelError(f"{self.source}: {self.prefix}{key} is {found}; it must be {wanted}")
