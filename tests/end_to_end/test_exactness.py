"""Greedy float32 output against Hugging Face transformers, token for token, on the default model."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from common.config import DEFAULT_MODEL
from common.model_source import resolve_model
from router.tokenizer import Tokenizer, load_tokenizer
from tests.end_to_end.local_cluster import LocalCluster, local_cluster

NUM_TOKENS = 12
TEXTS = [
    "The capital of France is",
    "def quicksort(items):\n    ",
    "1, 1, 2, 3, 5, 8, 13,",
    "Once upon a time, in a village by the sea,",
    "你好，世界！请告诉我",
    "人工智能正在改变我们的生活方式，因为",
    "🙂🚀 Emoji are fun: 👩‍👩‍👧‍👦",
    "Ünïcödé ÄÖÜ ß ñ é",
    "<html>\n<head>\n<title>",
    "SELECT name, COUNT(*) FROM users WHERE",
    "Q: What is 17 + 25?\nA:",
    "\n\n\t  ",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_model(DEFAULT_MODEL))


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """Twelve texts and a chat; then lengths: one token, around one block of 16, several chunks of 512, 2,000 tokens."""
    story = tokenizer.encode(" ".join(f"Chapter {n}. The {n * 37} ships sailed east at dawn." for n in range(400)))
    chat = tokenizer.encode("<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n")
    by_length = [story[:n] for n in (1, 15, 16, 17, 513, 1100, 2000)]
    return [tokenizer.encode(text) for text in TEXTS] + [chat] + by_length


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> list[list[int]]:
    """What transformers generates, from its own reading of the same GGUF file."""
    path: Path = resolve_model(DEFAULT_MODEL)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    model.eval()
    return [_generate(model, prompt) for prompt in prompts]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", ["auto", "tcp", "grpc", "torch_dist"])
async def test_the_pair_equals_transformers(
    prompts: list[list[int]], expected: list[list[int]], transport: str
) -> None:
    async with _cluster(sections={"transfer": {"transport": transport}}) as cluster:
        assert await _answers(cluster, prompts) == expected
        status = await cluster.decode_status()
        assert status.counters["received_prefills"] == sum(len(answer) > 1 for answer in expected)
        counters = dict(status.counters)  # a map of protobuf answers 0 for names that it does not have
        assert counters["kv_transfers_committed_total"] > 0
        assert counters["kv_stale_pieces_total"] == counters["quarantined_blocks"] == 0
        assert not any(name.startswith("kv_pieces_rejected_total") for name in counters)
        await cluster.wait_all_free()


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_the_colocated_engine_equals_transformers(prompts: list[list[int]], expected: list[list[int]]) -> None:
    async with _cluster(prefill=0, decode=0, colocated=1) as cluster:
        assert await _answers(cluster, prompts) == expected
        await cluster.wait_all_free()


def _cluster(**options: Any) -> AbstractAsyncContextManager[LocalCluster]:
    return local_cluster(DEFAULT_MODEL, pool={"kv_cache_gib": 0.6}, **options)


async def _answers(cluster: LocalCluster, prompts: list[list[int]]) -> list[list[int]]:
    """Four at a time: steps mix chunks of one prompt with decode tokens of others."""
    gate = asyncio.Semaphore(4)

    async def one(prompt: list[int]) -> list[int]:
        async with gate:
            return list((await cluster.generate(prompt, max_tokens=NUM_TOKENS)).token_ids)

    return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))


def _generate(model: AutoModelForCausalLM, prompt: list[int]) -> list[int]:
    tokens = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(  # type: ignore[attr-defined]
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            pad_token_id=2,
        )
    new_tokens: list[int] = out[0, len(prompt) :].tolist()
    return new_tokens
