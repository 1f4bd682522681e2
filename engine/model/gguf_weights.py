"""Weights and config from one .gguf file, as llama.cpp's converter writes it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from common.errors import ModelError
from engine.model.families.catalog import find_gguf_family
from engine.model.gguf_config import read_gguf_config
from engine.model.gguf_file import GGUFTensorInfo, read_gguf
from engine.model.names import numbers_in, translate

# The engine's name -> GGUF's, the same for all families; a layer's experts are one tensor, [experts, rows, columns].
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.{}.input_layernorm": "blk.{}.attn_norm",
    "model.layers.{}.self_attn.q_proj": "blk.{}.attn_q",
    "model.layers.{}.self_attn.k_proj": "blk.{}.attn_k",
    "model.layers.{}.self_attn.v_proj": "blk.{}.attn_v",
    "model.layers.{}.self_attn.o_proj": "blk.{}.attn_output",
    "model.layers.{}.self_attn.q_norm": "blk.{}.attn_q_norm",
    "model.layers.{}.self_attn.k_norm": "blk.{}.attn_k_norm",
    "model.layers.{}.post_attention_layernorm": "blk.{}.ffn_norm",
    "model.layers.{}.mlp.gate_proj": "blk.{}.ffn_gate",
    "model.layers.{}.mlp.up_proj": "blk.{}.ffn_up",
    "model.layers.{}.mlp.down_proj": "blk.{}.ffn_down",
    "model.layers.{}.mlp.gate": "blk.{}.ffn_gate_inp",
    "model.layers.{}.mlp.experts.{}.gate_proj": "blk.{}.ffn_gate_exps",
    "model.layers.{}.mlp.experts.{}.up_proj": "blk.{}.ffn_up_exps",
    "model.layers.{}.mlp.experts.{}.down_proj": "blk.{}.ffn_down_exps",
}
KINDS = (
    *(GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16),
    *(GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q5_0, GGMLQuantizationType.Q5_1),
    *(GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q2_K, GGMLQuantizationType.Q3_K, GGMLQuantizationType.Q4_K),
    *(GGMLQuantizationType.Q5_K, GGMLQuantizationType.Q6_K),
)
CHUNK_ELEMENTS = 1 << 20  # dequantised at a time: the float32 copy stays in the cache of most machines


class GGUFCheckpoint:
    def __init__(self, path: Path) -> None:
        self._file = read_gguf(path)
        self.config = read_gguf_config(self._file)
        self._family = find_gguf_family(self._file.metadata.get("general.architecture"), str(path))

    def tensor(self, name: str) -> GGUFTensor:
        """Raises: ModelError."""
        gguf_name = translate(name, NAMES)
        info = self._file.tensors.get(gguf_name)
        if info is None:
            raise ModelError(f"{self._file.path} has no tensor {gguf_name}; fetch the model again")
        if info.kind not in KINDS:
            supported = ", ".join(kind.name for kind in KINDS)
            raise ModelError(f"{self._file.path}: {gguf_name} is stored as {info.kind.name}; supported are {supported}")
        if ".experts." in name:
            info = self._expert(info, numbers_in(name)[-1])
        return GGUFTensor(info.kind, info.shape, info.data, self._permuted_heads(name))

    def _expert(self, info: GGUFTensorInfo, index: int) -> GGUFTensorInfo:
        if len(info.shape) != 3 or index >= info.shape[0]:
            raise ModelError(f"{self._file.path}: {info.name} has shape {list(info.shape)} and no expert {index}")
        num_rows = info.shape[1]
        return replace(info, shape=info.shape[1:], data=info.data[index * num_rows : (index + 1) * num_rows])

    def _permuted_heads(self, name: str) -> int | None:
        if not self._family.gguf_permutes_heads:
            return None
        if ".q_proj." in name:
            return self.config.num_heads
        return self.config.num_kv_heads if ".k_proj." in name else None


@dataclass(frozen=True)
class GGUFTensor:
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]  # [rows, bytes per row]; a vector is one row
    permuted_heads: int | None

    @property
    def source_dtype(self) -> str:
        return self.kind.name

    @property
    def num_bytes(self) -> int:
        return self.data.size

    def read(self, offset: int, num_bytes: int) -> bytes:
        return self.data.reshape(-1)[offset : offset + num_bytes].tobytes()

    def copy_to(self, destination: Tensor) -> None:
        rows = self.data
        if self.permuted_heads is not None:
            # A vector (the bias of a permuted matrix) is one row of bytes: regroup it by element first.
            by_element = rows if len(self.shape) > 1 else rows.reshape(self.shape[0], -1)
            rows = unpermute(by_element, self.permuted_heads).reshape(rows.shape)
        target = destination.view(rows.shape[0], self.shape[-1])
        step = max(1, CHUNK_ELEMENTS // self.shape[-1])
        for start in range(0, rows.shape[0], step):
            with np.errstate(invalid="ignore", over="ignore"):  # damaged scales: the loader looks at what came out
                chunk = dequantize(rows[start : start + step], self.kind)
            target[start : start + step].copy_(torch.from_numpy(chunk))


def unpermute(rows: npt.NDArray[np.uint8], num_heads: int) -> npt.NDArray[np.uint8]:
    """Undo llama.cpp's reordering of q and k, which puts the two dimensions that rotate together side by side.

    Within each head its rows are (0, d/2, 1, d/2 + 1, ...); ours are (0, 1, ...), dimension i turning with i + d/2.
    """
    paired = rows.reshape(num_heads, -1, 2, rows.shape[1])
    return paired.swapaxes(1, 2).reshape(rows.shape)
