"""The OpenAI API as the real openai client and plain HTTP see it, over a real uvicorn server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI

from common.errors import QueueFull, WorkerLost, WorkerUnavailable
from common.sampling import FinishReason

HELLO: dict[str, Any] = {"model": "tiny", "prompt": "Hi"}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
ENDPOINTS = [("/v1/completions", HELLO), ("/v1/chat/completions", CHAT)]


@pytest.fixture
async def client(served: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0, timeout=10) as client:
        yield client


@pytest.fixture
async def http(served: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=served.url, timeout=10) as http:
        yield http


def replay(served: Any, text: str) -> None:
    """The pipeline answers with this text, then the end-of-turn token."""
    served.pipeline.token_ids = [*served.frontend.tokenizer.encode(text), 2]


async def events(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    async with http.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in response.aiter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    data = [line.removeprefix("data: ") for line in lines]
    return [each if each == "[DONE]" else json.loads(each) for each in data]


# ---------------------------------------------------------------- answers


async def test_a_chat_answers_whole(served: Any, client: openai.AsyncOpenAI) -> None:
    replay(served, "你好, world 🙂")
    answer = await client.chat.completions.create(**CHAT)
    assert answer.choices[0].message.content == "你好, world 🙂"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "tiny"


async def test_a_chat_streams(served: Any, client: openai.AsyncOpenAI) -> None:
    replay(served, "你好, world 🙂")
    stream = await client.chat.completions.create(**CHAT, stream=True)
    deltas = [chunk.choices[0] async for chunk in stream]
    assert deltas[0].delta.role == "assistant"
    texts = [choice.delta.content or "" for choice in deltas]
    assert "".join(texts) == "你好, world 🙂"
    assert not any("\ufffd" in text for text in texts)
    assert [choice.finish_reason for choice in deltas if choice.finish_reason] == ["stop"]


async def test_a_completion_answers_whole_and_counts_each_token_once(served: Any, client: openai.AsyncOpenAI) -> None:
    replay(served, "one two three")
    answer = await client.completions.create(**HELLO)
    assert answer.choices[0].text == "one two three"
    assert answer.usage is not None
    num_prompt = len(served.frontend.tokenizer.encode("Hi"))
    assert answer.usage.prompt_tokens == num_prompt
    assert answer.usage.completion_tokens == 4
    assert answer.usage.total_tokens == num_prompt + 4
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


async def test_a_completion_streams_and_reports_usage_when_asked(served: Any, client: openai.AsyncOpenAI) -> None:
    replay(served, "one two three")
    stream = await client.completions.create(**HELLO, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == "one two three"
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 4


@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
async def test_a_stream_tells_where_its_time_went_when_asked(
    http: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    *chunks, last, _ = await events(http, path, {**body, "stream_options": {"include_timings": True}})
    timings = last["timings"]
    assert last["choices"] == []
    assert "usage" not in last
    assert sum(timings["stages"].values()) == pytest.approx(timings["end_to_end_s"])
    assert 0 < timings["ttft_s"] <= timings["end_to_end_s"]
    assert (timings["prefill_worker"], timings["decode_worker"], timings["attempts"]) == ("prefill-0", "decode-0", 1)
    assert not any("timings" in chunk for chunk in chunks)


async def test_usage_and_timings_come_in_one_last_chunk(http: httpx.AsyncClient) -> None:
    both = {"include_usage": True, "include_timings": True}
    *chunks, last, _ = await events(http, "/v1/completions", {**HELLO, "stream_options": both})
    assert last["usage"]["completion_tokens"] == 2
    assert last["timings"]["attempts"] == 1
    assert all(chunk["usage"] is None and "timings" not in chunk for chunk in chunks)


@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
async def test_a_stream_ends_with_done_and_repeats_one_id(
    http: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    *chunks, done = await events(http, path, body)
    assert done == "[DONE]"
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


async def test_completions_stop_after_sixteen_tokens_by_default(served: Any, client: openai.AsyncOpenAI) -> None:
    served.pipeline.token_ids = [19556] * 40
    answer = await client.completions.create(**HELLO)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


async def test_a_chat_may_fill_the_context_by_default(served: Any, client: openai.AsyncOpenAI) -> None:
    await client.chat.completions.create(**CHAT)
    request = served.pipeline.requests[0]
    assert request.sampling.max_tokens == 512 - len(request.prompt_token_ids)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_both_names_of_the_token_limit_work(served: Any, client: openai.AsyncOpenAI, name: str) -> None:
    served.pipeline.token_ids = [19556] * 40
    answer = await client.chat.completions.create(**CHAT, **{name: 3})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


async def test_token_ids_are_a_prompt_too(served: Any, client: openai.AsyncOpenAI) -> None:
    await client.completions.create(model="tiny", prompt=[19556, 905])
    await client.completions.create(model="tiny", prompt=[[19556, 905]])
    await client.completions.create(model="tiny", prompt=["Hello world"])
    assert [request.prompt_token_ids for request in served.pipeline.requests] == [[19556, 905]] * 3


async def test_text_parts_are_joined_and_developer_means_system(served: Any, client: openai.AsyncOpenAI) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages: Any = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    await client.chat.completions.create(model="tiny", messages=messages)
    text = served.frontend.tokenizer.decode(served.pipeline.requests[0].prompt_token_ids)
    assert "system\nBe brief." in text
    assert "user\na\nb" in text


async def test_sampling_options_reach_the_pipeline(served: Any, client: openai.AsyncOpenAI) -> None:
    extra = {"ignore_eos": True, "top_k": 5, "stop_token_ids": [7]}
    await client.completions.create(**HELLO, temperature=0, top_p=0.5, seed=9, max_tokens=2, extra_body=extra)
    sampling = served.pipeline.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.max_tokens) == (0, 0.5, 9, 2)
    assert (sampling.ignore_eos, sampling.top_k, sampling.stop_token_ids) == (True, 5, (7,))


@pytest.mark.parametrize("stop", ["thr", ["never", "thr"]])
async def test_a_stop_string_cuts_the_answer_and_closes_the_pipeline(
    served: Any, client: openai.AsyncOpenAI, stop: Any
) -> None:
    replay(served, "one two three four five")
    answer = await client.completions.create(**HELLO, stop=stop)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("one two ", "stop")
    assert served.pipeline.num_sent == 3
    assert served.pipeline.closed.is_set()


async def test_a_stop_string_never_shows_in_a_stream(served: Any, http: httpx.AsyncClient) -> None:
    replay(served, "one two three four five")
    *chunks, _ = await events(http, "/v1/completions", HELLO | {"stop": "two three"})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "one "


async def test_options_that_ask_for_nothing_are_accepted(client: openai.AsyncOpenAI) -> None:
    await client.chat.completions.create(
        **CHAT, n=1, user="me", metadata={"a": "b"}, store=False, service_tier="auto", logprobs=False,
        presence_penalty=0, frequency_penalty=0.0, logit_bias={}, response_format={"type": "text"}, stop=None,
    )  # fmt: skip


# ---------------------------------------------------------------- timing


@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
async def test_the_first_token_is_flushed_while_the_second_is_still_computed(
    served: Any, http: httpx.AsyncClient, soon: Any, path: str, body: dict[str, Any]
) -> None:
    served.pipeline.break_at = 1
    async with http.stream("POST", path, json=body | {"stream": True}) as response:
        lines = response.aiter_lines()
        seen = ""
        while "Hello" not in seen:
            seen += await soon(anext(lines))
    await soon(served.pipeline.closed.wait())


@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("break_at", [0, 1])
async def test_a_client_that_leaves_closes_the_pipeline(
    served: Any, http: httpx.AsyncClient, soon: Any, path: str, body: dict[str, Any], streams: bool, break_at: int
) -> None:
    served.pipeline.break_at = break_at
    asking = asyncio.create_task(http.post(path, json=body | {"stream": streams}))
    await soon(served.pipeline.waiting.wait())
    assert not served.pipeline.closed.is_set()
    asking.cancel()
    await soon(served.pipeline.closed.wait())


async def test_the_deadline_header_shortens_the_deadline(served: Any, http: httpx.AsyncClient) -> None:
    await http.post("/v1/completions", json=HELLO, headers={"X-Request-Deadline-Ms": "1500"})
    request = served.pipeline.requests[0]
    assert request.deadline_s == pytest.approx(request.timeline.arrival_s + 1.5)


# ---------------------------------------------------------------- failures of the service


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (QueueFull("256 requests are waiting"), openai.RateLimitError),
        (WorkerUnavailable("no prefill worker is registered"), openai.InternalServerError),
    ],
)
async def test_a_failure_before_the_first_token_has_its_own_status(
    served: Any, client: openai.AsyncOpenAI, streams: bool, error: Any, kind: type[openai.APIStatusError]
) -> None:
    served.pipeline.break_at, served.pipeline.error = 0, error
    with pytest.raises(kind, match=error.message) as caught:
        await client.chat.completions.create(**CHAT, stream=streams)
    assert caught.value.status_code == error.http_status
    assert caught.value.code == error.code
    assert caught.value.response.headers["retry-after"] == "1"


async def test_a_failure_inside_a_stream_is_its_last_event(served: Any, http: httpx.AsyncClient) -> None:
    served.pipeline.break_at, served.pipeline.error = 1, WorkerLost("decode-0 is gone")
    *chunks, last = await events(http, "/v1/completions", HELLO)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["Hello"]
    assert last["error"] == {
        "message": "decode-0 is gone",
        "type": "service_unavailable_error",
        "param": None,
        "code": "worker_lost",
    }


async def test_the_openai_client_raises_a_failure_inside_a_stream(served: Any, client: openai.AsyncOpenAI) -> None:
    served.pipeline.break_at, served.pipeline.error = 1, WorkerLost("decode-0 is gone")
    with pytest.raises(openai.APIError, match="decode-0 is gone"):
        async for _ in await client.chat.completions.create(**CHAT, stream=True):
            pass


async def test_a_failure_of_a_whole_answer_has_its_status_at_any_token(served: Any, client: openai.AsyncOpenAI) -> None:
    served.pipeline.break_at, served.pipeline.error = 1, WorkerLost("decode-0 is gone")
    with pytest.raises(openai.InternalServerError) as caught:
        await client.chat.completions.create(**CHAT)
    assert caught.value.status_code == 503


@pytest.mark.parametrize("token_ids", [[], [19556]])
async def test_an_answer_that_breaks_off_is_never_a_quiet_success(
    served: Any, client: openai.AsyncOpenAI, token_ids: list[int]
) -> None:
    served.pipeline.token_ids, served.pipeline.finish_reason = token_ids, None
    with pytest.raises(openai.InternalServerError, match="broke off"):
        await client.completions.create(**HELLO)


async def test_a_bug_is_a_500_in_openais_shape(served: Any, http: httpx.AsyncClient) -> None:
    served.pipeline.break_at, served.pipeline.error = 0, RuntimeError("a secret detail")
    response = await http.post("/v1/completions", json=HELLO)
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert "secret" not in response.text


async def test_a_bug_inside_a_stream_is_its_last_event(served: Any, http: httpx.AsyncClient) -> None:
    served.pipeline.break_at, served.pipeline.error = 1, RuntimeError("a secret detail")
    *_, last = await events(http, "/v1/completions", HELLO)
    assert last["error"]["message"] == "internal error"


# ---------------------------------------------------------------- the client's mistakes


async def test_the_openai_client_raises_its_typed_exceptions(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'gpt-5' is not served here"):
        await client.completions.create(model="gpt-5", prompt="Hi")
    with pytest.raises(openai.BadRequestError, match="temperature") as bad_temperature:
        await client.chat.completions.create(**CHAT, temperature=3)
    assert (bad_temperature.value.param, bad_temperature.value.code) == ("temperature", "invalid_sampling")
    with pytest.raises(openai.BadRequestError, match="512 tokens") as too_long:
        await client.completions.create(model="tiny", prompt=[1] * 600)
    assert too_long.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("path", "change", "param", "message"),
    [
        ("/v1/completions", {"prompt": ""}, "prompt", "prompt is empty"),
        ("/v1/completions", {"prompt": []}, "prompt", "prompt is empty"),
        ("/v1/completions", {"prompt": None}, "prompt", "prompt: Input should be a valid string; or: .*list"),
        ("/v1/completions", {"prompt": {"a": 1}}, "prompt", "prompt: "),
        ("/v1/completions", {"prompt": [1, "a"]}, "prompt", "prompt"),
        ("/v1/completions", {"prompt": ["a", "b"]}, "prompt", "several prompts"),
        ("/v1/completions", {"prompt": [[1], [2]]}, "prompt", "several prompts"),
        ("/v1/completions", {"prompt": [0, 50000]}, "prompt", "token id 50000 at index 1"),
        ("/v1/completions", {"prompt": "\ud800"}, "prompt", "prompt: .*not valid Unicode"),
        ("/v1/completions", {"model": "\ud800"}, "model", "is not served here"),
        ("/v1/completions", {"stop": ["a", "\ud800"]}, "stop", "stop: .*not valid Unicode"),
        ("/v1/completions", {"max_tokens": -1}, "max_tokens", "max_tokens is -1"),
        ("/v1/completions", {"max_tokens": "5"}, "max_tokens", "max_tokens: Input should be a valid integer"),
        ("/v1/completions", {"max_tokens": True}, "max_tokens", "max_tokens: Input should be a valid integer"),
        ("/v1/completions", {"max_tokens": 10**30}, "max_tokens", "max_tokens"),
        ("/v1/completions", {"seed": 2**70}, "seed", "seed"),
        ("/v1/completions", {"n": 2}, "n", "n is not supported with this value"),
        ("/v1/completions", {"logprobs": 0}, "logprobs", "logprobs is not supported"),
        ("/v1/completions", {"echo": True}, "echo", "echo is not supported"),
        ("/v1/completions", {"best_of": 3}, "best_of", "best_of is not supported"),
        ("/v1/completions", {"presence_penalty": 0.5}, "presence_penalty", "presence_penalty is not supported"),
        ("/v1/completions", {"logit_bias": {"5": 1}}, "logit_bias", "logit_bias is not supported"),
        ("/v1/completions", {"temprature": 1}, "temprature", "unknown field temprature"),
        ("/v1/completions", {"stop": ""}, "stop", "empty string"),
        ("/v1/completions", {"stop": 5}, "stop", "stop: "),
        ("/v1/completions", {"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
        ("/v1/completions", {"stream": True, "stream_options": {"usage": 1}}, "usage", "unknown field usage"),
        ("/v1/chat/completions", {"messages": []}, "messages", "messages is empty"),
        ("/v1/chat/completions", {"messages": "Hi"}, "messages", "messages: Input should be a valid list"),
        ("/v1/chat/completions", {"messages": [{"content": "Hi"}]}, "messages.0.role", "Field required"),
        ("/v1/chat/completions", {"messages": [{"role": "x", "content": ""}]}, "messages.0.role", "messages.0.role"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "messages.0.content", "Field required"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages",
            "'image_url' are not supported",
        ),
        ("/v1/chat/completions", {"tools": [{"type": "function"}]}, "tools", "tools is not supported"),
        ("/v1/chat/completions", {"response_format": {"type": "json_object"}}, "response_format", "not supported"),
    ],
)  # fmt: skip
async def test_a_mistake_is_a_typed_error_that_names_the_field(
    app: FastAPI, pipeline: Any, path: str, change: dict[str, Any], param: str, message: str
) -> None:
    body = (HELLO if path == "/v1/completions" else CHAT) | change
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as http:
        response = await http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert response.status_code == (404 if "model" in change else 400)
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    with pytest.raises(ValueError, match=message):
        raise ValueError(error["message"])
    assert pipeline.requests == []


@pytest.mark.parametrize(
    ("content", "content_type", "message"),
    [
        ('{"model": ', "application/json", "not valid JSON: Expecting value at position 10"),
        ("", "application/json", "must be a JSON object"),
        ("[1]", "application/json", "must be a JSON object"),
        ('{"prompt": "Hi"}', "application/x-www-form-urlencoded", "sent with Content-Type: application/json"),
        (b'{"prompt": "\xff"}', "application/json", "body"),
        ("[" * 100_000, "application/json", "body"),
    ],
)  # fmt: skip
async def test_a_body_that_is_not_a_json_object_is_a_400(
    http: httpx.AsyncClient, content: Any, content_type: str, message: str
) -> None:
    response = await http.post("/v1/completions", content=content, headers={"Content-Type": content_type})
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


async def test_a_body_that_is_too_large_is_a_413(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/completions", json={"prompt": "a" * (16 * 1024 * 1024)})
    assert response.status_code == 413
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("value", ["soon", "-5", "0", "1.5", "²"])
async def test_a_deadline_that_is_no_number_is_a_400(http: httpx.AsyncClient, value: str) -> None:
    headers = {"X-Request-Deadline-Ms": value.encode("utf-8")}
    response = await http.post("/v1/completions", json=HELLO, headers=headers)
    assert response.status_code == 400
    assert "milliseconds" in response.json()["error"]["message"]


async def test_wrong_paths_and_methods_have_openais_shape(http: httpx.AsyncClient) -> None:
    unknown, wrong = await http.get("/v1/nothing"), await http.get("/v1/completions")
    assert (unknown.status_code, wrong.status_code) == (404, 405)
    assert "/v1/nothing" in unknown.json()["error"]["message"]
    assert wrong.json()["error"]["type"] == "invalid_request_error"
    assert wrong.headers["allow"] == "POST"


# ---------------------------------------------------------------- around the answers


async def test_models_are_listed_and_described(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["tiny"]
    assert (await client.models.retrieve("tiny")).id == "tiny"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other/model")


async def test_health_is_200_only_when_a_request_can_be_served(served: Any, http: httpx.AsyncClient) -> None:
    assert (await http.get("/health")).status_code == 200
    served.limits.reason = "no decode worker is registered"
    response = await http.get("/health")
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "no decode worker is registered"


async def test_metrics_are_exposed_for_prometheus(http: httpx.AsyncClient) -> None:
    response = await http.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")


async def test_every_response_carries_a_request_id(served: Any, http: httpx.AsyncClient) -> None:
    given = await http.post("/v1/completions", json=HELLO, headers={"X-Request-Id": "trace-7"})
    assert given.headers["x-request-id"] == "trace-7"
    assert given.json()["id"] == "cmpl-trace-7"
    assert served.pipeline.requests[0].request_id == "trace-7"
    strange = await http.get("/nothing", headers={"X-Request-Id": "a b\tc"})
    assert len(strange.headers["x-request-id"]) == 24


async def test_the_documentation_describes_the_requests(http: httpx.AsyncClient) -> None:
    schema = (await http.get("/openapi.json")).json()
    assert "max_tokens" in schema["components"]["schemas"]["CompletionBody"]["properties"]
    assert (await http.get("/docs")).status_code == 200


async def test_eight_answers_at_once_do_not_mix(served: Any, client: openai.AsyncOpenAI) -> None:
    served.pipeline.token_ids = [19556, 905, 2]
    served.pipeline.finish_reason = FinishReason.STOP
    answers = await asyncio.gather(*(client.completions.create(**HELLO) for _ in range(8)))
    assert len({answer.id for answer in answers}) == 8
    assert {answer.choices[0].text for answer in answers} == {"Hello world"}
