"""The C face of src/kernels.cpp as ctypes sees it. Each structure mirrors the one of that name in src/."""

from __future__ import annotations

import ctypes
from ctypes import c_bool, c_double, c_float, c_int, c_int64, c_uint64, c_void_p
from pathlib import Path


class Weight(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        ("n", c_int64),
        ("k", c_int64),
        ("is_swiglu", c_bool),
    )


class Linear(ctypes.Structure):
    _fields_ = (
        ("x", c_void_p),
        ("packed", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
        ("residual", c_void_p),
        ("y", c_void_p),
        ("m", c_int64),
        ("columns", c_int64),
        ("k", c_int64),
        ("output", c_int),
    )


class RmsNorm(ctypes.Structure):
    _fields_ = (
        ("x", c_void_p),
        ("weight", c_void_p),
        ("y", c_void_p),
        ("m", c_int64),
        ("n", c_int64),
        ("eps", c_float),
    )


class HeadNorms(ctypes.Structure):
    _fields_ = (
        ("qkv", c_void_p),
        ("q_weight", c_void_p),
        ("k_weight", c_void_p),
        ("tokens", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("eps", c_float),
    )


class RotaryAndCache(ctypes.Structure):
    _fields_ = (
        ("qkv", c_void_p),
        ("angles", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("tokens", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
    )


class Attention(ctypes.Structure):
    _fields_ = (
        ("query", c_void_p),
        ("query_stride", c_int64),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("block_table", c_void_p),
        ("table_width", c_int64),
        ("block_size", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("query_start", c_void_p),
        ("seq_lens", c_void_p),
        ("sequences", c_int64),
        ("heads", c_int64),
        ("window", c_int64),
        ("scale", c_float),
        ("out", c_void_p),
    )


class Layer(ctypes.Structure):
    _fields_ = (
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("qkv", Linear),
        ("o", Linear),
        ("gate_up", Linear),
        ("down", Linear),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("block_size", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("window", c_int64),
        ("scale", c_float),
        ("eps", c_float),
    )


class LayerStep(ctypes.Structure):
    _fields_ = (
        ("tokens", c_int64),
        ("sequences", c_int64),
        ("angles", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("block_table", c_void_p),
        ("table_width", c_int64),
        ("query_start", c_void_p),
        ("seq_lens", c_void_p),
        ("x", c_void_p),
        ("workspace", c_void_p),
    )


class Model(ctypes.Structure):
    _fields_ = (
        ("embedding", c_void_p),
        ("layers", ctypes.POINTER(Layer)),
        ("norm", c_void_p),
        ("lm_head", Linear),
        ("vocab_size", c_int64),
        ("num_positions", c_int64),
        ("eps", c_float),
    )


class ModelStep(ctypes.Structure):
    _fields_ = (
        ("of_layers", LayerStep),
        ("token_ids", c_void_p),
        ("logits_indices", c_void_p),
        ("sampled", c_int64),
        ("logits", c_void_p),
    )


class SampledRow(ctypes.Structure):
    _fields_ = (
        ("seed", c_uint64),
        ("position", c_int64),
        ("temperature", c_double),
        ("top_p", c_double),
        ("top_k", c_int64),
    )


class Sampling(ctypes.Structure):
    _fields_ = (
        ("logits", c_void_p),
        ("vocab_size", c_int64),
        ("rows", ctypes.POINTER(SampledRow)),
        ("count", c_int64),
        ("tokens", c_void_p),
    )


def open_library(path: Path) -> ctypes.CDLL:
    """Raises: OSError; AttributeError when it is another library."""
    library = ctypes.CDLL(str(path))
    library.kernels_create.argtypes, library.kernels_create.restype = (c_int,), c_void_p
    library.kernels_destroy.argtypes, library.kernels_destroy.restype = (c_void_p,), None
    weight = c_void_p, ctypes.POINTER(Weight)
    library.kernels_pack_weight.argtypes, library.kernels_pack_weight.restype = (*weight, c_void_p), None
    library.kernels_pack_weight_int8.argtypes = (*weight, c_void_p, c_void_p)
    library.kernels_pack_weight_int8.restype = None
    library.kernels_read_memory.argtypes, library.kernels_read_memory.restype = (c_void_p, c_void_p, c_int64), c_float
    library.kernels_multiply_registers.argtypes = (c_void_p, c_int64)
    library.kernels_multiply_registers.restype = c_float
    model_step = c_void_p, ctypes.POINTER(Model), ctypes.POINTER(ModelStep)
    library.kernels_embed.argtypes, library.kernels_embed.restype = model_step, c_int
    library.kernels_layers.argtypes, library.kernels_layers.restype = (*model_step, c_int64, c_int64), None
    library.kernels_logits.argtypes, library.kernels_logits.restype = model_step, None
    for function, operation in (
        (library.kernels_linear, Linear),
        (library.kernels_rms_norm, RmsNorm),
        (library.kernels_head_norms, HeadNorms),
        (library.kernels_rotary_and_cache, RotaryAndCache),
        (library.kernels_attention, Attention),
        (library.kernels_sample, Sampling),
    ):
        function.argtypes, function.restype = (c_void_p, ctypes.POINTER(operation)), None
    return library
