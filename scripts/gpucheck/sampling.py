"""Sampled tokens: a device draws the ones that a CPU draws from the same logits."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from common.sampling import SamplingParams
from engine.sampler import sample
from gpucheck.figures import Figure, at_least

VOCAB_SIZE = 128_256  # Llama 3's
REQUESTS = {
    "plain": {},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.9},
    "both": {"top_k": 200, "top_p": 0.8, "temperature": 0.7},
}


def check_sampling(device: torch.device, *, num_rows: int, vocab_size: int = VOCAB_SIZE) -> Iterator[Figure]:
    """Logits are rounded, so that many are equal and only their ids rank them."""
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0)).mul(3).round(decimals=1)
    for name, options in REQUESTS.items():
        params = [SamplingParams(1, seed=seed, **options) for seed in range(num_rows)]  # type: ignore[arg-type]
        here, there = (sample(each, params, range(num_rows)).cpu() for each in (logits, logits.to(device)))
        yield at_least(f"sampled_{name}_as_on_the_cpu", (here == there).float().mean().item(), "of all", 1.0)
