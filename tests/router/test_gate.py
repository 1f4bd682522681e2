"""Keys and limits as clients of both APIs meet them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest

from common.config import ServeConfig
from common.errors import QueueFull, RateLimited, ServingError, Unauthorized
from common.pb import serving_pb2 as pb
from common.pb import serving_pb2_grpc as pb_grpc
from common.rpc import RETRY_AFTER_KEY, new_channel, to_serving_error
from common.standard_services import add_standard_services
from router.answer import ServedModel
from router.frontend import Frontend
from router.gate import make_gate
from router.grpc_api import InferenceServicer
from router.grpc_server import new_public_server
from router.priority_lanes import Priority
from router.tokenizer import Tokenizer

HELLO: dict[str, Any] = {"model": "tiny", "prompt": "Hi"}


def line(name: str, **limits: int) -> str:
    return json.dumps({"name": name, "sha256": sha256(name.encode()).hexdigest(), **limits}) + "\n"


@pytest.fixture
def refused() -> list[ServingError]:
    return []


@pytest.fixture
def frontend(pipeline: Any, limits: Any, tokenizer: Tokenizer, tmp_path: Path, refused: list[ServingError]) -> Frontend:
    """Keys are the names: free, few (2 requests a minute), and short (30 tokens a minute)."""
    path = tmp_path / "keys.jsonl"
    path.write_text(line("free") + line("few", requests_per_minute=2) + line("short", tokens_per_minute=30))
    config = ServeConfig.model_validate({"router": {"api_keys_file": str(path)}})
    gate = make_gate(config, refused.append)
    return Frontend(pipeline, tokenizer, ServedModel("tiny", limits), 60, gate)


@pytest.fixture
async def http(served: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=served.url, timeout=10) as http:
        yield http


def client(served: Any, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0, timeout=10)


@pytest.fixture
async def stub(frontend: Frontend) -> AsyncIterator[pb_grpc.InferenceStub]:
    server = new_public_server(frontend.gate)
    pb_grpc.add_InferenceServicer_to_server(InferenceServicer(frontend), server)
    await add_standard_services(server, ["pdserve.v1.Inference"])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with new_channel(f"127.0.0.1:{port}") as channel:
        yield pb_grpc.InferenceStub(channel)
    await server.stop(None)


# ---------------------------------------------------------------- HTTP


async def test_a_valid_key_is_served_and_its_name_reaches_the_pipeline(served: Any, pipeline: Any) -> None:
    async with client(served, "free") as api:
        await api.completions.create(**HELLO)
        assert [model.id async for model in api.models.list()] == ["tiny"]
    tenant = pipeline.requests[0].tenant
    assert tenant.name == "free"
    assert len(tenant.cache_salt) == 16


async def test_a_wrong_key_raises_openais_authentication_error(
    served: Any, pipeline: Any, refused: list[ServingError]
) -> None:
    async with client(served, "wrong") as api:
        with pytest.raises(openai.AuthenticationError, match="not known") as caught:
            await api.completions.create(**HELLO)
    assert (caught.value.status_code, caught.value.code) == (401, "invalid_api_key")
    assert caught.value.response.headers["www-authenticate"] == "Bearer"
    assert "x-request-id" in caught.value.response.headers
    assert pipeline.requests == []
    assert [type(error) for error in refused] == [Unauthorized]


@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions", "/v1/nothing", "/V1/models", "//v1/models", "/"])
async def test_without_a_key_every_path_but_the_open_ones_is_closed(http: httpx.AsyncClient, path: str) -> None:
    for method in ("GET", "POST", "HEAD", "OPTIONS"):
        assert (await http.request(method, path)).status_code == 401


@pytest.mark.parametrize(
    "path", ["/health", "/metrics", "/metrics/targets", "/dashboard", "/dashboard/state", "/openapi.json", "/docs"]
)
async def test_health_metrics_and_documentation_need_no_key(http: httpx.AsyncClient, path: str) -> None:
    assert (await http.get(path)).status_code == 200


async def test_the_limit_of_requests_is_a_429_that_says_when_to_come_back(
    served: Any, pipeline: Any, refused: list[ServingError]
) -> None:
    async with client(served, "few") as api:
        first = await api.completions.with_raw_response.create(**HELLO)
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert "x-ratelimit-limit-tokens" not in first.headers
        async for _ in await api.completions.create(**HELLO, stream=True):
            pass
        with pytest.raises(openai.RateLimitError, match="2 requests per minute") as caught:
            await api.completions.create(**HELLO)
    headers = caught.value.response.headers
    assert 28 <= int(headers["retry-after"]) <= 30
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert headers["x-ratelimit-reset-requests"][-1] == "s"
    assert (caught.value.code, caught.value.type) == ("rate_limit_exceeded", "rate_limit_error")
    assert len(pipeline.requests) == 2
    assert [type(error) for error in refused] == [RateLimited]


async def test_the_limit_of_tokens_counts_what_was_used_not_what_was_asked(served: Any, pipeline: Any) -> None:
    pipeline.token_ids = [19556, 905]
    async with client(served, "short") as api:
        for _ in range(5):  # asks for 17 each time, uses 3
            answer = await api.completions.with_raw_response.create(**HELLO)
        assert int(answer.headers["x-ratelimit-remaining-tokens"]) < 30
        with pytest.raises(openai.RateLimitError, match="30 tokens per minute"):
            await asyncio.gather(*(api.completions.create(**HELLO) for _ in range(5)))


async def test_a_request_that_was_never_placed_costs_no_tokens(served: Any, pipeline: Any) -> None:
    async def refuse(request: Any) -> AsyncIterator[Any]:
        raise QueueFull("full")
        yield

    pipeline.serve = refuse
    async with client(served, "short") as api:
        for _ in range(10):
            with pytest.raises(openai.RateLimitError, match="full"):
                await api.completions.create(**HELLO)


@pytest.mark.parametrize("priority", list(Priority))
async def test_the_priority_header_reaches_the_queue(
    http: httpx.AsyncClient, pipeline: Any, priority: Priority
) -> None:
    headers = {"Authorization": "Bearer free", "X-Request-Priority": priority}
    assert (await http.post("/v1/completions", json=HELLO, headers=headers)).status_code == 200
    assert pipeline.requests[0].priority is priority


async def test_an_unknown_priority_is_a_400(http: httpx.AsyncClient) -> None:
    headers = {"Authorization": "Bearer free", "X-Request-Priority": "urgent"}
    response = await http.post("/v1/completions", json=HELLO, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "X-Request-Priority"


# ---------------------------------------------------------------- gRPC


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


async def generate(stub: Any, key: str | None, **fields: Any) -> list[pb.GenerateResponse]:
    call = stub.Generate(pb.GenerateRequest(prompt="Hi", **fields), timeout=10, metadata=bearer(key) if key else None)
    return [response async for response in call]


async def test_grpc_takes_the_key_from_metadata(stub: Any, pipeline: Any) -> None:
    await generate(stub, "free", priority=pb.PRIORITY_HIGH)
    assert pipeline.requests[0].tenant.name == "free"
    assert pipeline.requests[0].priority is Priority.HIGH
    assert (await stub.ListModels(pb.ListModelsRequest(), metadata=bearer("free"))).models == ["tiny"]


@pytest.mark.parametrize("key", [None, "wrong"])
async def test_grpc_strangers_are_unauthenticated(stub: Any, pipeline: Any, key: str | None) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(stub, key)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert isinstance(to_serving_error(caught.value, "router"), Unauthorized)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.ListModels(pb.ListModelsRequest(), metadata=bearer(key) if key else None)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert pipeline.requests == []


async def test_grpc_has_the_same_limits_and_tells_them(stub: Any) -> None:
    call = stub.Generate(pb.GenerateRequest(prompt="Hi"), timeout=10, metadata=bearer("few"))
    assert dict(await call.initial_metadata())["x-ratelimit-remaining-requests"] == "1"
    async for _ in call:
        pass
    await generate(stub, "few")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(stub, "few")
    assert isinstance(to_serving_error(caught.value, "router"), RateLimited)
    assert 28 <= int(dict(caught.value.trailing_metadata() or ())[RETRY_AFTER_KEY]) <= 30


async def test_an_unknown_grpc_priority_is_a_mistake(stub: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(stub, "free", priority=77)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


# ---------------------------------------------------------------- configuration


async def test_salts_follow_the_secret_and_sharing_needs_none(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(line("free"))
    (tmp_path / "secret").write_text("0" * 32)

    def salt(**sections: Any) -> bytes:
        router = {"api_keys_file": str(tmp_path / "keys"), **sections.pop("router", {})}
        gate = make_gate(ServeConfig.model_validate({"router": router, **sections}), lambda _: None)
        return gate.tenant("Bearer free").cache_salt

    with_secret = {"security": {"secret_file": str(tmp_path / "secret")}}
    assert salt(**with_secret) == salt(**with_secret) != salt()
    assert salt() != salt()
    assert salt(router={"share_prefix_cache": True}) == b""
