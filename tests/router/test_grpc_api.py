"""The gRPC API as a generated client sees it, over a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from common.errors import QueueFull
from common.pb import serving_pb2 as pb
from common.pb import serving_pb2_grpc as pb_grpc
from common.rpc import ERROR_KEY, PARAM_KEY, new_channel, to_serving_error
from router.frontend import Frontend
from router.grpc_api import InferenceServicer
from router.grpc_server import new_public_server


@pytest.fixture
async def stub(frontend: Frontend) -> AsyncIterator[pb_grpc.InferenceStub]:
    server = new_public_server(frontend.gate)
    pb_grpc.add_InferenceServicer_to_server(InferenceServicer(frontend), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with new_channel(f"127.0.0.1:{port}") as channel:
        yield pb_grpc.InferenceStub(channel)
    await server.stop(None)


async def generate(stub: Any, **fields: Any) -> list[pb.GenerateResponse]:
    return [response async for response in stub.Generate(pb.GenerateRequest(**fields), timeout=10)]


async def failure(stub: Any, **fields: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(stub, **fields)
    return caught.value


async def test_text_and_tokens_stream_and_usage_comes_last(stub: Any, pipeline: Any, tokenizer: Any) -> None:
    pipeline.token_ids = [*tokenizer.encode("你好, world 🙂"), 2]
    responses = await generate(stub, prompt="Hi")
    assert "".join(response.text for response in responses) == "你好, world 🙂"
    assert not any("\ufffd" in response.text for response in responses)
    assert [token_id for response in responses for token_id in response.token_ids] == pipeline.token_ids
    *early, last = responses
    assert not any(response.finish_reason or response.HasField("usage") for response in early)
    assert last.finish_reason == "stop"
    assert last.usage.completion_tokens == len(pipeline.token_ids)
    assert last.usage.prompt_tokens == len(tokenizer.encode("Hi"))
    assert len({response.request_id for response in responses}) == 1


async def test_the_last_message_tells_the_requests_life(stub: Any) -> None:
    timings = (await generate(stub, prompt="Hi"))[-1].timings
    assert sum(stage.seconds for stage in timings.stages) == pytest.approx(timings.end_to_end_s, abs=1e-6)
    assert [stage.name for stage in timings.stages][:2] == ["queue", "reserve"]
    assert 0 < timings.ttft_s <= timings.end_to_end_s
    assert (timings.prefill_worker, timings.decode_worker, timings.attempts) == ("prefill-0", "decode-0", 1)


async def test_all_three_kinds_of_prompt_are_served(stub: Any, pipeline: Any, tokenizer: Any) -> None:
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="Hi")])
    await generate(stub, prompt="Hi", model="tiny")
    await generate(stub, prompt_token_ids=pb.TokenIds(ids=[5, 6]))
    await generate(stub, chat=chat)
    texts = [tokenizer.decode(request.prompt_token_ids) for request in pipeline.requests]
    assert texts[0] == "Hi"
    assert pipeline.requests[1].prompt_token_ids == [5, 6]
    assert "user\nHi" in texts[2]


async def test_unset_options_take_their_defaults_and_set_ones_are_kept(stub: Any, pipeline: Any) -> None:
    await generate(stub, prompt="Hi")
    await generate(stub, prompt="Hi", sampling=pb.SamplingParams(max_tokens=1, temperature=0, top_k=3, seed=0))
    default, chosen = (request.sampling for request in pipeline.requests)
    assert (default.temperature, default.top_p, default.top_k) == (1, 1, 0)
    assert default.max_tokens > 500
    assert (chosen.temperature, chosen.max_tokens, chosen.top_k, chosen.seed) == (0, 1, 3, 0)


async def test_a_stop_string_ends_the_stream(stub: Any, pipeline: Any, tokenizer: Any) -> None:
    pipeline.token_ids = tokenizer.encode("one two three four")
    responses = await generate(stub, prompt="Hi", stop=["two"])
    assert "".join(response.text for response in responses) == "one "
    assert responses[-1].finish_reason == "stop"
    assert pipeline.closed.is_set()


@pytest.mark.parametrize(
    ("fields", "status", "kind", "param"),
    [
        ({"prompt": "Hi", "model": "gpt-5"}, grpc.StatusCode.NOT_FOUND, "UnknownModel", "model"),
        ({"prompt": ""}, grpc.StatusCode.INVALID_ARGUMENT, "InvalidRequest", "prompt"),
        ({}, grpc.StatusCode.INVALID_ARGUMENT, "InvalidRequest", "input"),
        ({"prompt_token_ids": pb.TokenIds(ids=[1] * 600)}, grpc.StatusCode.INVALID_ARGUMENT, "PromptTooLong", "prompt"),
        (
            {"prompt": "Hi", "sampling": pb.SamplingParams(max_tokens=0)},
            grpc.StatusCode.INVALID_ARGUMENT,
            "InvalidSampling",
            "max_tokens",
        ),
        (
            {"chat": pb.ChatMessages(messages=[pb.ChatMessage(role="x", content="Hi")])},
            grpc.StatusCode.INVALID_ARGUMENT,
            "InvalidRequest",
            "chat",
        ),
        ({"chat": pb.ChatMessages()}, grpc.StatusCode.INVALID_ARGUMENT, "InvalidRequest", None),
    ],
)
async def test_a_mistake_keeps_its_type_and_field(
    stub: Any, fields: dict[str, Any], status: grpc.StatusCode, kind: str, param: str | None
) -> None:
    error = await failure(stub, **fields)
    trailing = dict(error.trailing_metadata() or ())
    assert (error.code(), trailing[ERROR_KEY]) == (status, kind)
    assert param is None or trailing[PARAM_KEY] == param


async def test_a_failure_of_the_service_keeps_its_type(stub: Any, pipeline: Any) -> None:
    pipeline.break_at, pipeline.error = 1, QueueFull("256 requests are waiting")
    error = await failure(stub, prompt="Hi")
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert isinstance(to_serving_error(error, "router"), QueueFull)


@pytest.mark.parametrize("break_at", [0, 1])
async def test_a_client_that_cancels_closes_the_pipeline(stub: Any, pipeline: Any, soon: Any, break_at: int) -> None:
    pipeline.break_at = break_at
    call = stub.Generate(pb.GenerateRequest(prompt="Hi"))
    reading = asyncio.ensure_future(call.read())
    await soon(pipeline.waiting.wait())
    assert not pipeline.closed.is_set()
    call.cancel()
    await soon(pipeline.closed.wait())
    await asyncio.gather(reading, return_exceptions=True)


async def test_the_calls_deadline_is_the_requests(stub: Any, pipeline: Any, soon: Any) -> None:
    pipeline.break_at = 1
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in stub.Generate(pb.GenerateRequest(prompt="Hi"), timeout=0.5):
            pass
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await soon(pipeline.closed.wait())
    request = pipeline.requests[0]
    assert request.deadline_s - request.timeline.arrival_s <= 0.51  # grpc rounds to milliseconds


async def test_models_are_listed(stub: Any) -> None:
    assert list((await stub.ListModels(pb.ListModelsRequest())).models) == ["tiny"]
