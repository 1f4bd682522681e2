"""From a model file or folder to a model that is ready to run."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from common.errors import ModelError
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder
from engine.model.placements import Placement, placements
from engine.model.safetensors_weights import SafetensorsCheckpoint


@dataclass(frozen=True)
class LoadedModel:
    model: Decoder
    config: ModelConfig
    fingerprint: str  # hex; of a sample of the weights' bytes: equal if they are the same, and hardly ever if not
    rope: str  # canonical description of the rotary embedding


class StoredTensor(Protocol):
    """A weight still in its file."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def source_dtype(self) -> str: ...

    @property
    def num_bytes(self) -> int: ...

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Raw bytes as they are stored, quantised or not."""

    def copy_to(self, destination: Tensor) -> None:
        """Fill `destination`, of the same shape, in whatever dtype and on whatever device it is."""


class Checkpoint(Protocol):
    """An open model file or folder. Tensors go by the engine's names (see Family), whatever the file calls them."""

    config: ModelConfig

    def tensor(self, name: str) -> StoredTensor:
        """Raises: ModelError when the file does not hold it."""


def load_model(path: Path, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    """Load a folder with config.json and *.safetensors, or one .gguf file, tensor by tensor.

    Raises: ModelError naming the file and what to do about it.
    """
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    # Shapes before memory: a wrong config must fail by name, not by an allocation of its size.
    placed = list(_placed(checkpoint, path))
    model = Decoder(config, dtype, device)
    parameters = dict(model.named_parameters())
    digest = hashlib.sha256(config.describe().encode())
    for placement, stored in placed:
        digest.update(f"{placement.name} {stored.shape} {stored.source_dtype}".encode())
        for offset, num_bytes in sample_windows(stored.num_bytes):
            digest.update(stored.read(offset, num_bytes))
        rows = parameters[placement.parameter].narrow(0, placement.row, placement.shape[0])
        stored.copy_to(rows)
        _require_finite(rows, f"{path}: {placement.name}")
    return LoadedModel(model, config, digest.hexdigest(), config.rope.describe())


def open_checkpoint(path: Path) -> Checkpoint:
    """Raises: ModelError."""
    if path.is_dir():
        return SafetensorsCheckpoint(path)
    if path.suffix == ".gguf":
        from engine.model.gguf_weights import GGUFCheckpoint  # the gguf library is needed for nothing else

        return GGUFCheckpoint(path)
    raise ModelError(f"{path} is neither a Hugging Face folder nor a .gguf file")


def sample_windows(num_bytes: int, num_windows: int = 16, window: int = 256) -> list[tuple[int, int]]:
    """(offset, length) of evenly spaced samples, both ends included: cheap on a large file, yet no training run
    leaves all of them as they were."""
    if num_bytes <= num_windows * window:
        return [(0, num_bytes)]
    return [(i * (num_bytes - window) // (num_windows - 1), window) for i in range(num_windows)]


def _placed(checkpoint: Checkpoint, path: Path) -> Iterator[tuple[Placement, StoredTensor]]:
    for placement in placements(checkpoint.config):
        stored = checkpoint.tensor(placement.name)
        if stored.shape != placement.shape:
            raise ModelError(
                f"{path}: tensor {placement.name} has shape {list(stored.shape)} where its config asks for "
                f"{list(placement.shape)}; the file and its config do not belong together"
            )
        yield placement, stored


def _require_finite(weight: Tensor, name: str) -> None:
    """Damaged bytes seldom make a readable number; found here, not as gibberish in an answer."""
    smallest, largest = torch.aminmax(weight)
    if not (torch.isfinite(smallest) and torch.isfinite(largest)):
        raise ModelError(f"{name} holds numbers that are not finite in {weight.dtype}; fetch the model again")
