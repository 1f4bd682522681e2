"""How well weights of one kind predict a fixed text: what a quantization costs, as far as a few pages can tell."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from common.errors import ConfigError
from common.sampling import SamplingParams
from engine.attention.cpu import CpuAttention
from engine.batch import Batch, build_batch
from engine.forward import EagerForward, Forward
from engine.kv_cache import KVCache, KVCacheShape
from engine.model.weights import load_model
from engine.native.load import load_native
from engine.native.model import accelerate
from engine.native.packing import WeightFormat
from engine.sequence import ScheduledSequence, Sequence

TEXT = Path(__file__).with_name("quality_text.txt")  # written for this purpose, so no model has learned it
CPU = torch.device("cpu")
BLOCK_SIZE = 16
STEP_TOKENS = 256  # logits of a step are 50 MB with a vocabulary of 49,152


@dataclass(frozen=True)
class Predictions:
    """Of each token of a text but the first, given those before it."""

    log_likelihoods: Tensor  # [num_tokens - 1] float32
    likeliest: Tensor  # [num_tokens - 1] int64, which token the model would have chosen greedily

    @property
    def perplexity(self) -> float:
        return math.exp(-self.log_likelihoods.double().mean().item())

    def agreement(self, other: Predictions) -> float:
        """At how many of the places both would choose the same token."""
        return (self.likeliest == other.likeliest).double().mean().item()


@torch.inference_mode()
def predictions(model_path: Path, token_ids: list[int], weights: WeightFormat | None, num_threads: int) -> Predictions:
    """weights: on the native kernels, or None for torch in float32.

    Raises: ConfigError where the kernels are wanted and there are none.
    """
    num_blocks = -(-len(token_ids) // BLOCK_SIZE)
    forward = _forward(model_path, num_blocks, weights, num_threads)
    sequence = Sequence(token_ids, SamplingParams(max_tokens=1))
    sequence.block_table = list(range(num_blocks))
    log_likelihoods, likeliest = [], []
    for start in range(0, len(token_ids) - 1, STEP_TOKENS):
        end = min(start + STEP_TOKENS, len(token_ids) - 1)
        logits = forward(_batch(sequence, start, end), None)
        following = torch.tensor(token_ids[start + 1 : end + 1])
        log_likelihoods.append(logits.log_softmax(dim=-1).gather(1, following[:, None])[:, 0])
        likeliest.append(logits.argmax(dim=-1))
    return Predictions(torch.cat(log_likelihoods), torch.cat(likeliest))


def _forward(model_path: Path, num_blocks: int, weights: WeightFormat | None, num_threads: int) -> Forward:
    dtype = torch.float32 if weights is None else torch.bfloat16
    loaded = load_model(model_path, dtype, CPU)
    config = loaded.config
    shape = KVCacheShape(config.num_layers, num_blocks, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    kv_cache = KVCache(shape, dtype, CPU)
    if weights is None:
        return EagerForward(loaded.model, kv_cache, CpuAttention(CPU))
    kernels = load_native(num_threads)
    if kernels is None:
        raise ConfigError("this machine has no native kernels, and without them there is no quantization")
    return accelerate(loaded, kernels, kv_cache, weights)


def _batch(sequence: Sequence, start: int, end: int) -> Batch:
    """Wants the logits of every token."""
    batch = build_batch([ScheduledSequence(sequence, start, end - start)], BLOCK_SIZE, CPU)
    return replace(batch, logits_indices=torch.arange(end - start))
