"""Each family through the whole engine: chunks, batches, preemption and the prefix cache change no token."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import torch

from common.engine_config import EngineConfig
from common.sampling import SamplingParams
from engine.build import build_engine
from engine.sequence import SampledToken, ScheduledSequence, Sequence

PROMPT = torch.randint(0, 151, (60,), generator=torch.Generator().manual_seed(11)).tolist()
NUM_ANSWER_TOKENS = 24
GREEDY = SamplingParams(max_tokens=NUM_ANSWER_TOKENS, temperature=0, ignore_eos=True)
NUM_BLOCKS = 36  # of 4 tokens: the first three prompts below fit, but not with their answers


class Unobserved:
    def on_scheduled(self, scheduled: Seq[ScheduledSequence]) -> None: ...
    def on_sampled(self, sampled: Seq[SampledToken]) -> None: ...


def test_every_family_gives_transformers_tokens_with_too_little_memory_for_its_batch(oracle: Any) -> None:
    config = oracle.model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token_bytes = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * head_dim
    engine = build_engine(
        EngineConfig(
            oracle.folder,
            dtype="float32",
            num_threads=1,
            block_size=4,
            kv_cache_bytes=NUM_BLOCKS * 4 * token_bytes,
            max_num_batched_tokens=24,
        )
    )
    # The last two begin as the first does, so blocks that it leaves behind are used again.
    prompts = [PROMPT[:50], PROMPT[5:45], PROMPT[30:], PROMPT, PROMPT[:33]]
    sequences = [Sequence(list(prompt), GREEDY) for prompt in prompts]
    for sequence in sequences:
        engine.add(sequence)
    for _ in range(1000):
        if not engine.has_work:
            break
        engine.step(Unobserved())
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert sequence.token_ids[len(prompt) :] == oracle.greedy(prompt, NUM_ANSWER_TOKENS)
    counters = engine.counters()
    assert counters["preemptions"] > 0
    assert counters["prefix_hit_tokens"] > 0
