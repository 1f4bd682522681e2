"""Greedy tokens of a tiny random model: the same through the reference, step by step, and through CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from random import Random

import torch

from common.engine_config import EngineConfig
from common.sampling import SamplingParams
from engine.build import assemble_engine
from engine.cuda_graphs import Capture
from engine.engine import Engine
from engine.model.weights import LoadedModel
from engine.sequence import SampledToken, ScheduledSequence, Sequence
from gpucheck.figures import Figure, at_least
from gpucheck.random_llama import load_random, tiny_llama

PROMPT_LENGTHS = (1, 2, 15, 16, 17, 40, 100)
CPU = torch.device("cpu")


class Unwatched:
    """A step observer that looks at nothing."""

    def on_scheduled(self, scheduled: Seq[ScheduledSequence]) -> None: ...

    def on_sampled(self, sampled: Seq[SampledToken]) -> None: ...


def check_generation(device: torch.device, capture: Capture, *, max_tokens: int) -> Iterator[Figure]:
    """float32, so that no rounding decides between two tokens."""
    config = EngineConfig(
        Path("random"), "float32", "cpu", "torch_reference", block_size=16, kv_cache_bytes=8 << 20, max_num_seqs=8
    )
    expected = _answers(assemble_engine(_load(CPU), config, CPU), max_tokens)
    config = replace(config, device=str(device), attention="triton")
    for name, wanted in (("eager", None), ("cuda_graphs", capture)):
        answers = _answers(assemble_engine(_load(device), config, device, wanted), max_tokens)
        same = sum(mine == theirs for mine, theirs in zip(answers, expected, strict=True)) / len(expected)
        yield at_least(f"greedy_answers_{name}_as_reference", same, "of all", 1.0)


def _load(device: torch.device) -> LoadedModel:
    return load_random(tiny_llama(), torch.float32, device, std=0.2)


def _answers(engine: Engine, max_tokens: int) -> list[list[int]]:
    """All prompts together, then each step's decodes: batches of many sizes, prefills among them."""
    random = Random(0)
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    sequences = [Sequence([random.randrange(512) for _ in range(n)], sampling) for n in PROMPT_LENGTHS]
    for sequence in sequences:
        engine.add(sequence)
    while engine.has_work:
        engine.step(Unwatched())
    return [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in sequences]
