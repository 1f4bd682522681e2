"""Whatever JSON or protobuf a client makes up, it gets an answer or a typed refusal, and never an internal error."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import InvalidRequest
from common.pb import serving_pb2 as pb
from common.pb import serving_pb2_grpc as pb_grpc
from common.rpc import new_channel, to_serving_error
from router.frontend import Frontend
from router.grpc_api import InferenceServicer
from router.grpc_server import new_public_server
from router.openai_fields import HARMLESS, UNSUPPORTED
from router.openai_schema import ChatBody, CompletionBody

# the same server for every example: none may leave anything behind that disturbs the next
MANY = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

OUR_FIELDS = {*ChatBody.model_fields, *CompletionBody.model_fields, "role", "content", "text"}
NAMES = st.sampled_from(sorted({*OUR_FIELDS, *HARMLESS, *UNSUPPORTED})) | st.text(max_size=5)
NUMBERS = st.integers() | st.floats() | st.sampled_from([2**31, 2**63, -(2**63), 10**400])
LEAVES = st.none() | st.booleans() | NUMBERS | st.text() | st.sampled_from(["user", "system", "text", "\ud800", "\x00"])
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4))
BODIES = st.dictionaries(NAMES, VALUES, max_size=6)
MESSAGES = st.fixed_dictionaries({"role": st.just("user"), "content": VALUES})
PROMPTS = st.fixed_dictionaries({"prompt": VALUES}) | st.fixed_dictionaries(
    {"messages": st.lists(MESSAGES, max_size=3)}
)
PATHS = st.sampled_from(["/v1/completions", "/v1/chat/completions"])
DAMAGE = st.lists(st.tuples(st.integers(0, 10_000), st.binary(max_size=3)), max_size=4)


@pytest.fixture
async def http(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """In this process; a bug in the app would be raised here."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as http:
        yield http


async def post(http: httpx.AsyncClient, path: str, content: bytes, **headers: bytes) -> httpx.Response:
    response = await http.post(path, content=content, headers={"Content-Type": b"application/json", **headers})
    if response.status_code != 200:
        assert 400 <= response.status_code < 500, response.text
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
    return response


def damaged(content: bytes, damage: list[tuple[int, bytes]]) -> bytes:
    for position, patch in damage:
        position %= len(content) + 1
        content = content[:position] + patch + content[position + len(patch) :]
    return content


@MANY
@given(PATHS, BODIES, PROMPTS)
async def test_any_json_is_answered_or_refused_in_openais_shape(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], prompt: dict[str, Any]
) -> None:
    await post(http, path, json.dumps({**body, **prompt}).encode())


@MANY
@given(PATHS, BODIES, PROMPTS, DAMAGE)
async def test_damaged_json_is_answered_or_refused_in_openais_shape(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], prompt: dict[str, Any], damage: list[tuple[int, bytes]]
) -> None:
    await post(http, path, damaged(json.dumps({**body, **prompt}).encode(), damage))


HEADERS = st.sampled_from(["X-Request-Id", "X-Request-Priority", "X-Request-Deadline-Ms", "Authorization"])
HEADER_TEXT = st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=30)
DIGITS = st.integers(0, 5000).map("9".__mul__)


@MANY
@given(st.dictionaries(HEADERS, HEADER_TEXT | DIGITS))
async def test_any_header_is_understood_or_refused(http: httpx.AsyncClient, headers: dict[str, str]) -> None:
    encoded = {name: value.encode("latin-1") for name, value in headers.items()}
    await post(http, "/v1/completions", b'{"prompt": "Hi"}', **encoded)


# ---------------------------------------------------------------- gRPC


@pytest.fixture
async def channel(frontend: Frontend) -> AsyncIterator[grpc.aio.Channel]:
    server = new_public_server(frontend.gate)
    pb_grpc.add_InferenceServicer_to_server(InferenceServicer(frontend), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with new_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


async def generate(channel: grpc.aio.Channel, message: bytes) -> None:
    call = channel.unary_stream("/pdserve.v1.Inference/Generate")
    try:
        num_answers = len([answer async for answer in call(message, timeout=30)])
    except grpc.aio.AioRpcError as failure:
        error = to_serving_error(failure, "router")
    else:
        assert num_answers > 0
        return
    assert isinstance(error, InvalidRequest), error


FLOATS = st.floats(width=32)
UNSIGNED = st.integers(0, 2**32 - 1)
SAMPLING = st.builds(
    pb.SamplingParams,
    max_tokens=UNSIGNED,
    temperature=FLOATS,
    top_p=FLOATS,
    top_k=UNSIGNED,
    seed=st.integers(0, 2**64 - 1),
    ignore_eos=st.booleans(),
    stop_token_ids=st.lists(UNSIGNED, max_size=3),
)
ROLES = st.sampled_from(["user", "assistant", "tool", ""])
CHATS = st.lists(st.builds(pb.ChatMessage, role=ROLES, content=st.text()), max_size=3)
INPUTS = (
    st.builds(dict, prompt=st.text())
    | st.builds(dict, prompt_token_ids=st.builds(pb.TokenIds, ids=st.lists(UNSIGNED, max_size=5)))
    | st.builds(dict, chat=st.builds(pb.ChatMessages, messages=CHATS))
    | st.just({})
)
OPTIONS = {
    "sampling": SAMPLING,
    "stop": st.lists(st.text(), max_size=5),
    "model": st.text(),
    "priority": st.integers(0, 9),
}
REST = st.fixed_dictionaries({}, optional=OPTIONS)


@MANY
@given(INPUTS, REST)
async def test_any_message_is_answered_or_refused_by_type(
    channel: grpc.aio.Channel, given_input: dict[str, Any], rest: dict[str, Any]
) -> None:
    await generate(channel, pb.GenerateRequest(**given_input, **rest).SerializeToString())


@MANY
@given(INPUTS, REST, DAMAGE)
async def test_a_damaged_message_is_answered_or_refused_by_type(
    channel: grpc.aio.Channel, given_input: dict[str, Any], rest: dict[str, Any], damage: list[tuple[int, bytes]]
) -> None:
    await generate(channel, damaged(pb.GenerateRequest(**given_input, **rest).SerializeToString(), damage))


@MANY
@given(st.binary(max_size=200))
async def test_any_bytes_are_answered_or_refused_by_type(channel: grpc.aio.Channel, message: bytes) -> None:
    await generate(channel, message)
