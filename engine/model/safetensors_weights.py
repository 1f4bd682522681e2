"""Weights from a Hugging Face folder: one or many *.safetensors files beside config.json."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.errors import ModelError
from engine.model.hf_config import read_hf_config, read_hf_family, read_json_object
from engine.model.names import translate

DTYPES = ("F32", "F16", "BF16")
INDEX_NAME = "model.safetensors.index.json"


class SafetensorsCheckpoint:
    """The files are mapped, not read: a tensor costs memory only while it is copied."""

    def __init__(self, folder: Path) -> None:
        self.config = read_hf_config(folder)
        self._names = read_hf_family(folder).hf_names
        self._folder = folder
        self._file_of: dict[str, tuple[Path, Any]] = {}  # tensor name -> its file and that file's open handle
        for path in _weight_files(folder):
            with _naming(path):
                handle: Any = safe_open(path, framework="pt", device="cpu")
                self._file_of.update((name, (path, handle)) for name in handle.keys())  # noqa: SIM118

    def tensor(self, name: str) -> SafetensorsTensor:
        """Raises: ModelError."""
        name = translate(name, self._names)
        if name not in self._file_of:
            raise ModelError(f"{self._folder} has no tensor {name}; fetch the model again")
        path, handle = self._file_of[name]
        with _naming(path):
            header = handle.get_slice(name)
            tensor = SafetensorsTensor(path, handle, name, tuple(header.get_shape()), str(header.get_dtype()))
        if tensor.source_dtype not in DTYPES:
            raise ModelError(f"{path}: {name} is stored as {tensor.source_dtype}; supported are {', '.join(DTYPES)}")
        return tensor


@dataclass(frozen=True)
class SafetensorsTensor:
    path: Path
    handle: Any  # safetensors' own reader, which is untyped
    name: str
    shape: tuple[int, ...]
    source_dtype: str

    @property
    def num_bytes(self) -> int:
        return self._bytes.numel()

    def read(self, offset: int, num_bytes: int) -> bytes:
        return self._bytes[offset : offset + num_bytes].numpy().tobytes()

    def copy_to(self, destination: Tensor) -> None:
        destination.copy_(self._tensor)

    @cached_property
    def _tensor(self) -> Tensor:
        with _naming(self.path):
            tensor: Tensor = self.handle.get_tensor(self.name)
        return tensor

    @property
    def _bytes(self) -> Tensor:
        return self._tensor.reshape(-1).view(torch.uint8)


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX_NAME
    if index.exists():
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index} holds no weight_map; fetch the model again")
        paths = sorted({folder / str(name) for name in weight_map.values()})
    else:
        paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ModelError(f"{folder} holds no *.safetensors file; other weight formats must be converted first")
    for path in paths:
        _require_readable(path)
    return paths


def _require_readable(path: Path) -> None:
    """safetensors does not tell an unreadable file from a damaged one."""
    try:
        if not path.is_file():
            raise ModelError(f"{path} is missing though {INDEX_NAME} names it; fetch the model again")
        path.open("rb").close()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """safetensors' errors, with the file's name and what to do."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is corrupt or truncated ({error}); delete it and fetch the model again") from error
