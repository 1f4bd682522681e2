"""The openai client, unchanged, against the whole system."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.end_to_end.local_cluster import LocalCluster, local_cluster

CHAT = [{"role": "user", "content": "Say something."}]


@pytest.fixture
async def cluster(tiny_model: Path) -> AsyncIterator[LocalCluster]:
    async with local_cluster(tiny_model) as made:
        yield made
        await made.wait_all_free()


async def test_chat_streamed_and_whole_give_the_same_answer_and_usage(cluster: LocalCluster) -> None:
    options = {"model": "tiny", "messages": CHAT, "max_tokens": 30, "temperature": 0}
    whole = await cluster.openai.chat.completions.create(**options)
    stream = await cluster.openai.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert whole.usage.prompt_tokens_details is not None
    assert chunks[-1].usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 16  # the second time its first block is known
    assert whole.usage.completion_tokens <= 30
    assert {chunk.choices[0].finish_reason for chunk in chunks if chunk.choices} == {
        None,
        whole.choices[0].finish_reason,
    }


async def test_completions_take_text_or_token_ids_and_the_seed_decides(cluster: LocalCluster) -> None:
    async def answer(prompt: str | list[int], seed: int) -> str:
        got = await cluster.openai.completions.create(
            model="tiny", prompt=prompt, max_tokens=20, temperature=1, seed=seed, extra_body={"ignore_eos": True}
        )
        assert got.usage is not None
        assert got.usage.completion_tokens == 20
        return got.choices[0].text

    first = await answer("hello", seed=1)
    assert await answer(list(b"hello"), seed=1) == first
    assert await answer("hello", seed=2) != first


async def test_a_stop_string_ends_the_answer_on_both_workers(cluster: LocalCluster) -> None:
    free = await cluster.complete("hello", max_tokens=60, ignore_eos=True)
    text = free["choices"][0]["text"]
    stop = text[10:12]
    cut = await cluster.complete("hello", max_tokens=60, ignore_eos=True, stop=[stop])
    assert cut["choices"][0]["text"] == text[: text.index(stop)]
    assert cut["choices"][0]["finish_reason"] == "stop"
    assert cut["usage"]["completion_tokens"] < 60
    metrics = (await cluster.http.get("/metrics")).text
    assert 'requests_total{error="",state="finished"} 2.0' in metrics


async def test_many_requests_at_once_each_get_their_own_answer(cluster: LocalCluster) -> None:
    prompts = [f"prompt number {n} " * (n + 1) for n in range(12)]

    async def ask(prompt: str) -> str:
        answer = await cluster.complete(prompt, max_tokens=25, ignore_eos=True)
        text: str = answer["choices"][0]["text"]
        return text

    together = await asyncio.gather(*(ask(prompt) for prompt in prompts))
    assert [await ask(prompt) for prompt in prompts] == together


async def test_mistakes_raise_the_clients_own_exceptions(cluster: LocalCluster) -> None:
    complete = cluster.openai.completions.create
    with pytest.raises(openai.NotFoundError, match="is not served"):
        await complete(model="gpt-4", prompt="hi")
    with pytest.raises(openai.BadRequestError, match="4096") as too_long:
        await complete(model="tiny", prompt=[1] * 5000)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="temperature"):
        await complete(model="tiny", prompt="hi", temperature=3)
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        await complete(model="tiny", prompt="hi", max_tokens=-1)
    with pytest.raises(openai.BadRequestError, match="999"):
        await complete(model="tiny", prompt=[1, 999])
    with pytest.raises(openai.BadRequestError, match="empty"):
        await complete(model="tiny", prompt="")
    invalid = await cluster.http.post("/v1/completions", content=b"{not json")
    assert invalid.status_code == 400
    assert invalid.json()["error"]["type"] == "invalid_request_error"
    assert (await cluster.complete("still here", max_tokens=2))["usage"]["completion_tokens"] >= 1


async def test_the_first_chunk_arrives_before_the_answer_is_finished(cluster: LocalCluster) -> None:
    """LESSONS 28: a buffered stream would show everything at the end."""
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    async with cluster.http.stream("POST", "/v1/completions", json=body) as response:
        events = _events(response)  # kept: one that is let go of closes the response
        assert (await anext(events)).startswith("data: {")
        load = (await cluster.decode_status()).load
        assert load.num_running + load.num_reserved + load.num_waiting == 1  # the first token does not wait for the KV


async def _events(response: httpx.Response) -> AsyncIterator[str]:
    async for line in response.aiter_lines():
        if line:
            yield line
