"""The checks by name, at the two sizes that gpu_check.py runs them in."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from common.engine_config import EngineConfig
from engine.attention.select import select_attention
from engine.build import assemble_engine
from engine.cuda_graphs import CudaCapture
from gpucheck.attention import SHAPES, SMALL_BLOCKS, check_attention
from gpucheck.figures import Figure
from gpucheck.generation import check_generation
from gpucheck.random_llama import Cost, llama3_8b, load_random
from gpucheck.sampling import check_sampling
from gpucheck.speed import Load, Speed
from gpucheck.timing import measure_limits
from gpucheck.transfer import check_transfer

MAX_MODEL_LEN = 4096


def attention(*, is_small: bool) -> Iterator[Figure]:
    shapes = {name: SHAPES[name] for name in ("decode", "mixed")} if is_small else SHAPES
    yield from check_attention(torch.device("cuda:0"), shapes, SMALL_BLOCKS)


def generation(*, is_small: bool) -> Iterator[Figure]:
    device = torch.device("cuda:0")
    yield from check_generation(device, CudaCapture(device), max_tokens=8 if is_small else 64)


def sampling(*, is_small: bool) -> Iterator[Figure]:
    yield from check_sampling(torch.device("cuda:0"), num_rows=16 if is_small else 128)


def transfer(*, is_small: bool) -> Iterator[Figure]:
    source, destination = torch.device("cuda:0"), torch.device("cuda", min(1, torch.cuda.device_count() - 1))
    num_tokens = 256 if is_small else 4096
    yield from check_transfer(source, destination, ("loopback", "grpc", "torch_dist"), num_tokens=num_tokens)


def speed(*, is_small: bool) -> Iterator[Figure]:
    """With our own attention, and with the one that a worker would choose here, if that is another."""
    device = torch.device("cuda:0")
    limits = measure_limits(device, num_bytes=1 << 32, matrix_size=8192)
    yield from limits.figures()
    model = llama3_8b(num_layers=4 if is_small else 32)
    config = EngineConfig(Path("random"), max_num_batched_tokens=2048, max_model_len=MAX_MODEL_LEN)
    loaded = load_random(model, torch.bfloat16, device, std=0.02)
    load = Load(prefill_tokens=(512,), decode_batches=(1, 8), num_prompts=2) if is_small else Load()
    for attention in dict.fromkeys(("triton", select_attention("auto", device, torch.bfloat16).name)):
        engine = assemble_engine(loaded, replace(config, attention=attention), device, CudaCapture(device))
        for figure in Speed(engine, Cost(model, bytes_per_number=2), limits).figures(load):
            yield replace(figure, name=f"{attention}_{figure.name}")
        del engine  # and its KV cache, which took most of the memory
        gc.collect()


CHECKS: dict[str, Callable[..., Iterator[Figure]]] = {
    check.__name__: check for check in (attention, generation, sampling, transfer, speed)
}
