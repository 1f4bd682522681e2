"""From an EngineConfig to a running Engine."""

from __future__ import annotations

import logging
import os
import time

import torch

from common.engine_config import EngineConfig
from common.errors import ConfigError
from common.kv_layout import KVLayout
from engine.attention.base import default_block_size
from engine.attention.select import CAPTURABLE, select_attention
from engine.block_manager import BlockManager
from engine.cuda_graphs import Capture, CudaCapture, DecodeGraphs, DecodeShape
from engine.engine import Engine, EngineDescription, EngineLimits
from engine.forward import EagerForward, Forward
from engine.kv_cache import KVCache, KVCacheShape
from engine.kv_cache_size import kv_cache_bytes
from engine.model.config import ModelConfig
from engine.model.dtype import resolve_device, resolve_dtype
from engine.model.weights import LoadedModel, load_model
from engine.native.attention import NativeAttention
from engine.native.kernels import NativeKernels
from engine.native.load import NoKernels, load_native, require_native
from engine.native.model import accelerate, misfit
from engine.native.packing import WeightFormat
from engine.native.sampling import NativeSampler
from engine.pace import Pace
from engine.sampler import Sampler, sample
from engine.scheduler import Scheduler

logger = logging.getLogger(__name__)

GIB = 2**30
MIN_BLOCKS = 2
DEFAULT_THREADS = torch.get_num_threads()  # of this process, before an engine on the native kernels leaves torch one


def build_engine(config: EngineConfig) -> Engine:
    """Load the weights, size the KV cache, choose the attention backend.

    Raises: ModelError, ConfigError.
    """
    torch.set_num_threads(config.num_threads or DEFAULT_THREADS)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    start_s = time.monotonic()
    loaded = load_model(config.model_path, dtype, device)
    logger.info("loaded %s in %.1f s", config.model_path.name, time.monotonic() - start_s)
    return assemble_engine(loaded, config, device, CudaCapture(device) if device.type == "cuda" else None)


def assemble_engine(
    loaded: LoadedModel, config: EngineConfig, device: torch.device, capture: Capture | None = None
) -> Engine:
    """An engine around a model that is on the device already. With a capture, decode steps are replayed from graphs,
    if the attention backend allows it.

    Raises: ConfigError.
    """
    dtype = loaded.model.dtype
    num_threads = torch.get_num_threads()
    kernels = _native_kernels(config, loaded, device)
    weights = _weight_format(config, loaded, kernels)
    attention = select_attention(config.attention, device, dtype) if kernels is None else NativeAttention(kernels)
    if attention.name not in CAPTURABLE:
        capture = None
    num_scratch_blocks = 0 if capture is None else 1  # for padding rows, and given to no sequence
    shape = _kv_cache_shape(config, loaded.config, dtype, device)
    num_blocks = shape.num_blocks - num_scratch_blocks
    capacity = num_blocks * shape.block_size
    description = _describe(loaded, config, shape, capacity)
    kv_cache = _allocate(shape, dtype, device)
    forward: Forward
    sampler: Sampler
    if kernels is None:
        forward, sampler = EagerForward(loaded.model, kv_cache, attention), sample
    else:
        forward, sampler = accelerate(loaded, kernels, kv_cache, weights), NativeSampler(kernels)
    if capture is not None:
        limits = description.limits
        decodes = DecodeShape(
            limits.max_num_seqs, limits.max_model_len, shape.block_size, shape.num_layers, scratch_block=num_blocks
        )
        forward = DecodeGraphs(forward, capture, decodes, device)
    budget = config.max_num_batched_tokens or default_step_tokens(device)
    scheduler = Scheduler(BlockManager(num_blocks, shape.block_size), budget, config.max_num_seqs)
    logger.info(
        "%s, quantization %s, on %s, attention %s, %d blocks of %d tokens, CUDA graphs %s, %d threads",
        description.layout.dtype,
        config.quantization,
        device,
        attention.name,
        num_blocks,
        shape.block_size,
        "off" if capture is None else "for decode steps",
        num_threads,
    )
    return Engine(forward, kv_cache, scheduler, sampler, description, Pace(budget, config.tpot_goal_s))


def _allocate(shape: KVCacheShape, dtype: torch.dtype, device: torch.device) -> KVCache:
    """Raises: ConfigError where there is not that much memory, which a CPU's would often only say when it is used."""
    num_bytes = shape.num_blocks * shape.num_elements_per_block * dtype.itemsize
    problem = f"there is no memory for a KV cache of {num_bytes / GIB:,.1f} GiB on {device}: set a smaller kv_cache_gib"
    if device.type == "cpu" and num_bytes > (total := os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")):
        raise ConfigError(f"{problem}; this machine has {total / GIB:,.1f} GiB")
    try:
        return KVCache(shape, dtype, device)
    except RuntimeError as error:
        raise ConfigError(problem) from error


def _describe(loaded: LoadedModel, config: EngineConfig, shape: KVCacheShape, capacity: int) -> EngineDescription:
    layout = KVLayout(
        model_fingerprint=loaded.fingerprint,
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=str(loaded.model.dtype).removeprefix("torch."),
        rope=loaded.rope,
    )
    limits = EngineLimits(
        vocab_size=loaded.config.vocab_size,
        max_model_len=_max_model_len(config, loaded.config, capacity),
        max_num_seqs=config.max_num_seqs,
        kv_capacity_tokens=capacity,
        block_size=shape.block_size,
    )
    return EngineDescription(layout, limits, loaded.config.eos_token_ids)


def _native_kernels(config: EngineConfig, loaded: LoadedModel, device: torch.device) -> NativeKernels | None:
    """The CPU kernels for the whole model, if they are wanted and can be had. Where they are only welcome, the log
    says why not.

    Raises: ConfigError when they were asked for by name and cannot be had.
    """
    kernels: NativeKernels | None = None
    if config.attention == "native":
        kernels = _required_kernels(loaded, device)
    elif config.attention == "auto" and device.type == "cpu":
        kernels = _welcome_kernels(loaded)
    if kernels is not None and loaded.config.experts is None:
        torch.set_num_threads(1)  # torch has little left to do, and its idle threads would spin
    return kernels


def _required_kernels(loaded: LoadedModel, device: torch.device) -> NativeKernels:
    """Raises: ConfigError."""
    reason = f"they run on the CPU, not on {device}" if device.type != "cpu" else misfit(loaded)
    if reason is None:
        try:
            return require_native(torch.get_num_threads())
        except NoKernels as error:
            reason = str(error)
    raise ConfigError(f"attention: native asks for the native CPU kernels, but {reason}; use auto")


def _welcome_kernels(loaded: LoadedModel) -> NativeKernels | None:
    reason = misfit(loaded)
    if reason is None:
        return load_native(torch.get_num_threads())
    level = logging.INFO if loaded.model.dtype != torch.bfloat16 else logging.WARNING  # a dtype is chosen, a shape not
    logger.log(level, "native kernels are off: %s", reason)
    return None


def _weight_format(config: EngineConfig, loaded: LoadedModel, kernels: NativeKernels | None) -> WeightFormat:
    """Raises: ConfigError."""
    if config.quantization == "none":
        return WeightFormat.BFLOAT16
    if kernels is None:
        raise ConfigError(
            "quantization: int8 is of the native CPU kernels, which need a CPU with AVX512-BF16, a C++ compiler, dtype "
            "bfloat16 and attention auto or native; use quantization: none"
        )
    if loaded.config.experts is not None:
        raise ConfigError("quantization: int8 is for models without experts; use quantization: none")
    return WeightFormat(config.quantization)


def default_step_tokens(device: torch.device) -> int:
    """A step cannot be interrupted: on one core 256 prompt tokens of the default model take about a third of a second,
    which bounds how long a cancelled request keeps its blocks. A GPU needs more tokens to be busy."""
    return 2048 if device.type == "cuda" else 256


def _kv_cache_shape(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> KVCacheShape:
    block_size = config.block_size or default_block_size(device)
    one_block = KVCacheShape(model.num_layers, 1, block_size, model.num_kv_heads, model.head_dim)
    block_bytes = one_block.num_elements_per_block * dtype.itemsize
    num_blocks = kv_cache_bytes(config, device) // block_bytes
    if num_blocks < MIN_BLOCKS:
        remedy = "kv_cache_gib" if config.kv_cache_bytes is not None else "gpu_memory_fraction"
        raise ConfigError(
            f"{remedy} gives room for {num_blocks} KV blocks of {block_bytes:,} bytes; at least {MIN_BLOCKS} are needed"
        )
    return KVCacheShape(model.num_layers, num_blocks, block_size, model.num_kv_heads, model.head_dim)


def _max_model_len(config: EngineConfig, model: ModelConfig, capacity: int) -> int:
    wanted = config.max_model_len
    if wanted is None:
        return min(model.max_position_embeddings, capacity)
    if wanted > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len is {wanted}; the model was trained for {model.max_position_embeddings} positions"
        )
    if wanted > capacity:
        raise ConfigError(f"max_model_len is {wanted} tokens but the KV cache holds {capacity}; raise kv_cache_gib")
    return wanted
