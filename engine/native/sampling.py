"""Sampling on the native kernels and their threads: engine/sampler.py's tokens in a fraction of the time."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from common.sampling import SamplingParams
from engine.native import abi
from engine.native.kernels import NativeKernels, address_of


class NativeSampler:
    """A Sampler, see engine/sampler.py."""

    def __init__(self, kernels: NativeKernels) -> None:
        self._kernels = kernels

    def __call__(self, logits: Tensor, params: Seq[SamplingParams], positions: Seq[int]) -> Tensor:
        count, vocab_size = logits.shape
        rows = (abi.SampledRow * count)()
        for row, wanted, position in zip(rows, params, positions, strict=True):
            row.seed, row.position = wanted.seed, position
            row.temperature, row.top_p = wanted.temperature, wanted.top_p
            row.top_k = min(wanted.top_k, vocab_size)  # the client's number may be larger than 64 bits
        tokens = torch.empty(count, dtype=torch.int64)
        logits_address, tokens_address = address_of(logits, torch.float32), address_of(tokens, torch.int64)
        self._kernels.sample(abi.Sampling(logits_address, vocab_size, rows, count, tokens_address))
        return tokens
