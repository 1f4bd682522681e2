"""The key-value header of a GGUF file, without its tensors.

The gguf library maps every string of a vocabulary to an array of its own, which takes seconds; a router needs the
header alone and should be up at once. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2, 3.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from common.errors import ModelError

GGUFValue = int | float | bool | str | list["GGUFValue"]

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def read_gguf_metadata(path: Path) -> dict[str, GGUFValue]:
    """Raises: ModelError when the file is missing, is not GGUF, or ends too soon."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Header(data, path).read()
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped; text that is not UTF-8
        raise ModelError(f"cannot read the GGUF file {path}: {error}") from error


class _Header:
    """A cursor over the mapped file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self._offset = 0

    def read(self) -> dict[str, GGUFValue]:
        if self._bytes(4) != _MAGIC:
            raise ModelError(f"{self._path} is not a GGUF file")
        version = self._uint32()
        if version not in (2, 3):
            raise ModelError(f"{self._path} has GGUF version {version}; versions 2 and 3 (little-endian) are supported")
        self._uint64()  # number of tensors
        return {self._string(): self._value(self._uint32()) for _ in range(self._count())}

    def _value(self, kind: int) -> GGUFValue:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item_kind, count = self._uint32(), self._count()
            if item_kind in _SCALARS:
                return list(self._unpack(f"<{count}{_SCALARS[item_kind]}"))
            return [self._value(item_kind) for _ in range(count)]
        if kind not in _SCALARS:
            raise ModelError(f"{self._path} is corrupt: unknown value type {kind} in its header")
        return self._unpack(f"<{_SCALARS[kind]}")[0]

    def _string(self) -> str:
        return self._bytes(self._count()).decode("utf-8")

    def _count(self) -> int:
        count = self._uint64()
        if count > len(self._data):
            raise self._too_short()
        return count

    def _uint32(self) -> int:
        return int(self._unpack("<I")[0])

    def _uint64(self) -> int:
        return int(self._unpack("<Q")[0])

    def _unpack(self, layout: str) -> tuple[int | float | bool, ...]:
        return struct.unpack(layout, self._bytes(struct.calcsize(layout)))

    def _bytes(self, count: int) -> bytes:
        end = self._offset + count
        if end > len(self._data):
            raise self._too_short()
        found = self._data[self._offset : end]
        self._offset = end
        return found

    def _too_short(self) -> ModelError:
        return ModelError(f"{self._path} is corrupt: it ends inside its own header")
