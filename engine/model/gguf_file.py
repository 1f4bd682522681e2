"""Reading the GGUF container: metadata, and where each tensor's bytes lie. Knows nothing of models.

The gguf library's own reader takes seconds over a tokenizer's token list, which no engine needs, and answers a broken
file with whatever exception comes first; this one skips the first and checks every length against the file.
Format: the GGUF specification, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from common.errors import ModelError

MAGIC = b"GGUF"
SCALARS = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}
MAX_DIMENSIONS = 4


@dataclass(frozen=True)
class GGUFTensorInfo:
    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]  # rows first, as torch has it; the file lists dimensions the other way round
    data: npt.NDArray[np.uint8]  # [rows, bytes per row], mapped from the file


@dataclass(frozen=True)
class GGUFFile:
    path: Path
    metadata: dict[str, Any]  # scalars and strings; arrays are left out
    tensors: dict[str, GGUFTensorInfo]


def read_gguf(path: Path) -> GGUFFile:
    """Raises: ModelError when the file is missing, truncated or not GGUF."""
    try:
        data = np.memmap(path, dtype=np.uint8, mode="c")  # private pages: torch refuses read-only arrays
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}; fetch the model again") from error
    cursor = _Cursor(path, data)
    if cursor.take(4) != MAGIC:
        raise ModelError(f"{path} is not a GGUF file; delete it and fetch the model again")
    version = cursor.scalar(GGUFValueType.UINT32)
    if version not in (2, 3):
        raise ModelError(f"{path} is GGUF version {version}; supported are 2 and 3, little-endian")
    num_tensors, num_keys = cursor.scalar(GGUFValueType.UINT64), cursor.scalar(GGUFValueType.UINT64)

    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string()
        value = cursor.value(cursor.value_type())
        if value is not None:
            metadata[key] = value
    headers = [_read_tensor_header(cursor) for _ in range(num_tensors)]

    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1:
        raise cursor.corrupt(f"an alignment of {alignment!r}")
    data_start = -(-cursor.offset // alignment) * alignment
    tensors = {header.name: _map_tensor(cursor, header, data_start) for header in headers}
    return GGUFFile(path, metadata, tensors)


@dataclass(frozen=True)
class _TensorHeader:
    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int  # from the start of the data section


class _Cursor:
    """A position in the file that never leaves it."""

    def __init__(self, path: Path, data: npt.NDArray[np.uint8]) -> None:
        self._path = path
        self.data = data
        self._view = data.data
        self.offset = 0

    def take(self, num_bytes: int) -> bytes:
        start = self.skip(num_bytes)
        return bytes(self._view[start : self.offset])

    def skip(self, num_bytes: int) -> int:
        """The offset from before."""
        start = self.offset
        if num_bytes > len(self._view) - start:
            raise self.corrupt("an end in the middle of its header")
        self.offset = start + num_bytes
        return start

    def scalar(self, kind: GGUFValueType) -> Any:
        layout = SCALARS[kind]
        start = self.skip(struct.calcsize(layout))
        return struct.unpack_from(layout, self._view, start)[0]

    def string(self) -> str:
        try:
            return self.take(self.scalar(GGUFValueType.UINT64)).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.corrupt("a name that is not UTF-8") from error

    def value_type(self) -> GGUFValueType:
        number = self.scalar(GGUFValueType.UINT32)
        try:
            return GGUFValueType(number)
        except ValueError as error:
            raise self.corrupt(f"a value of unknown type {number}") from error

    def value(self, kind: GGUFValueType) -> Any:
        """A scalar or a string; an array is skipped and gives None."""
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind == GGUFValueType.ARRAY:
            return self._skip_array()
        return self.scalar(kind)

    def _skip_array(self) -> None:
        kind, length = self.value_type(), self.scalar(GGUFValueType.UINT64)
        if kind == GGUFValueType.ARRAY:
            raise self.corrupt("an array of arrays")
        if kind != GGUFValueType.STRING:
            self.skip(length * struct.calcsize(SCALARS[kind]))
            return
        for _ in range(length):
            self.skip(self.scalar(GGUFValueType.UINT64))

    def corrupt(self, found: str) -> ModelError:
        return ModelError(f"{self._path} is corrupt or truncated: it has {found}; delete it and fetch the model again")


def _read_tensor_header(cursor: _Cursor) -> _TensorHeader:
    name = cursor.string()
    num_dimensions = cursor.scalar(GGUFValueType.UINT32)
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise cursor.corrupt(f"{num_dimensions} dimensions in tensor {name!r}")
    shape = tuple(cursor.scalar(GGUFValueType.UINT64) for _ in range(num_dimensions))[::-1]
    number = cursor.scalar(GGUFValueType.UINT32)
    try:
        kind = GGMLQuantizationType(number)
    except ValueError as error:
        raise cursor.corrupt(f"an unknown type {number} in tensor {name!r}") from error
    return _TensorHeader(name, kind, shape, cursor.scalar(GGUFValueType.UINT64))


def _map_tensor(cursor: _Cursor, header: _TensorHeader, data_start: int) -> GGUFTensorInfo:
    block_size, block_bytes = GGML_QUANT_SIZES[header.kind]
    row, num_rows = header.shape[-1], prod(header.shape[:-1])
    if row % block_size:
        raise cursor.corrupt(f"rows of {row} in tensor {header.name!r}, not a multiple of {block_size}")
    row_bytes = row // block_size * block_bytes
    start, num_bytes = data_start + header.offset, num_rows * row_bytes
    if start + num_bytes > cursor.data.size:
        raise cursor.corrupt(f"no room for all of tensor {header.name!r}")
    return GGUFTensorInfo(
        header.name, header.kind, header.shape, cursor.data[start : start + num_bytes].reshape(num_rows, row_bytes)
    )
