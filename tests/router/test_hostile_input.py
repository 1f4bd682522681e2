"""What a hostile client sends: it gets a typed refusal, costs little memory, and the next client is served."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import grpc
import httpx
import pytest
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send

from common.errors import InvalidRequest
from common.pb import serving_pb2 as pb
from common.pb import serving_pb2_grpc as pb_grpc
from common.rpc import new_channel, to_serving_error
from router.frontend import MAX_REQUEST_BYTES, MIN_REQUEST_BYTES, Frontend
from router.grpc_api import InferenceServicer
from router.grpc_server import new_public_server
from router.http_middleware import BodyLimitMiddleware, BodyLimits
from router.http_server import LINGER_S

MIB = 1024 * 1024
PATIENCE_S = 30.0
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@dataclass
class Answer:
    status: int
    error: dict[str, Any]


class Caller:
    """A raw connection, which says what it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    async def answer(self) -> Answer:
        async with asyncio.timeout(PATIENCE_S):
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
            return Answer(int(head.split()[1]), json.loads(await self._reader.readexactly(length))["error"])

    def stop_reading(self) -> None:
        """What comes from now on stays in the kernel, and then with the server."""
        self.writer.transport.pause_reading()

    async def end(self) -> None:
        """Raises: TimeoutError when the server does not close the connection."""
        async with asyncio.timeout(PATIENCE_S):
            try:
                while await self._reader.read(65536):
                    pass
            except ConnectionResetError:
                pass


@asynccontextmanager
async def call(url: str) -> AsyncIterator[Caller]:
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        yield Caller(reader, writer)
    finally:
        writer.close()


async def still_serves(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
        response = await http.post("/v1/completions", json={"model": "tiny", "prompt": "Hi"})
    assert response.status_code == 200


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize("framing", [b"Content-Length: 104857600\r\n", b"Transfer-Encoding: chunked\r\n"])
async def test_a_body_of_a_hundred_megabytes_is_refused_within_a_megabyte(served: Any, framing: bytes) -> None:
    chunk = b" " * MIB if framing.startswith(b"Content") else b"100000\r\n" + b" " * MIB + b"\r\n"
    async with call(served.url) as caller:
        caller.writer.write(HEAD + framing + b"\r\n")
        tracemalloc.start()
        sending = asyncio.create_task(_send(caller, [chunk] * 100))
        answer = await caller.answer()
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
    assert answer.status == 413
    assert answer.error["type"] == "invalid_request_error"
    assert peak_bytes < 8 * MIB
    await still_serves(served.url)


async def test_an_announced_size_is_refused_before_a_byte_of_it_is_sent(served: Any) -> None:
    async with call(served.url) as caller:
        caller.writer.write(HEAD + b"Content-Length: 104857600\r\nExpect: 100-continue\r\n\r\n")
        assert (await caller.answer()).status == 413  # and not 100


async def test_a_body_of_two_lengths_is_refused_and_its_connection_closed(served: Any) -> None:
    """Another server on the way might see it end elsewhere, and take what follows for a request of somebody else."""
    async with call(served.url) as caller:
        caller.writer.write(HEAD + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n")
        answer = await caller.answer()
        assert answer.status == 400
        assert "not both" in answer.error["message"]
        await caller.end()
    await still_serves(served.url)


async def test_a_packed_body_is_refused_by_name(served: Any) -> None:
    async with call(served.url) as caller:
        caller.writer.write(HEAD + b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\n1234")
        answer = await caller.answer()
        assert answer.status == 415
        assert "'gzip'" in answer.error["message"]
    await still_serves(served.url)


async def test_a_client_that_goes_on_sending_a_refused_body_is_cut_off(served: Any) -> None:
    async with call(served.url) as caller:
        caller.writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        sending = asyncio.create_task(_send_for_ever(caller, b"100000\r\n" + b" " * MIB + b"\r\n"))
        assert (await caller.answer()).status == 413
        await caller.end()
        await asyncio.wait_for(asyncio.gather(sending, return_exceptions=True), PATIENCE_S)
    await still_serves(served.url)


async def test_a_refused_body_that_ends_soon_leaves_the_connection_open(served: Any) -> None:
    async with call(served.url) as caller:
        caller.writer.write(HEAD + b"Content-Length: 2000000\r\n\r\n" + b" " * 2_000_000)
        assert (await caller.answer()).status == 413
        await asyncio.sleep(LINGER_S + 0.1)
        caller.writer.write(b"GET /v1/nothing HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await caller.answer()).status == 404


async def test_the_limit_follows_the_models_context(served: Any, limits: Any) -> None:
    assert served.frontend.max_request_bytes() == MIN_REQUEST_BYTES
    limits.context = 131_072
    assert MIN_REQUEST_BYTES < served.frontend.max_request_bytes() < MAX_REQUEST_BYTES
    limits.context = 10**9
    assert served.frontend.max_request_bytes() == MAX_REQUEST_BYTES


@pytest.mark.parametrize(
    "flood",
    [
        b"".join(b"X-%d: y\r\n" % i for i in range(20_000)),
        b"X-Long: " + b"y" * MIB + b"\r\n",
        b"Authorization: Bearer " + b"y" * 100_000 + b"\r\n",
    ],
    ids=["many", "long", "key"],
)
async def test_a_flood_of_headers_is_refused_in_openais_shape(served: Any, flood: bytes) -> None:
    async with call(served.url) as caller:
        caller.writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n" + flood)
        answer = await caller.answer()
        await caller.end()
    assert answer.status == 400
    assert answer.error["code"] == "invalid_request"
    await still_serves(served.url)


@pytest.mark.parametrize("noise", [b"\x16\x03\x01\x02\x00\x01\x00", b"GET\r\n\r\n", b"\x00" * 100 + b"\r\n\r\n"])
async def test_what_is_no_http_is_refused_in_openais_shape(served: Any, noise: bytes) -> None:
    async with call(served.url) as caller:
        caller.writer.write(noise + b"\r\n\r\n")
        assert (await caller.answer()).status == 400
        await caller.end()
    await still_serves(served.url)


# ---------------------------------------------------------------- contents


@pytest.mark.parametrize(
    "content",
    [
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": ' + b"[" * 500_000,
        b'{"prompt": ' + b"[" * 500 + b"1" + b"]" * 500 + b"}",
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b'{"prompt": "Hi", "max_tokens": ' + b"9" * 100_000 + b"}",
        b'{"prompt": "Hi", "temperature": NaN}',
        b'{"prompt": "Hi", "temperature": 1e999}',
        b"{" + b",".join(b'"k%d":1' % i for i in range(50_000)) + b"}",
        b'{"prompt": [' + b"[]," * 300_000 + b"[]]}",
        b'{"prompt": [' + b"1," * 400_000 + b"1]}",
        b"\x00" * 1000,
        b"null",
    ],
    ids=["latin", "half", "deep", "nested", "objects", "digits", "nan", "inf", "keys", "lists", "ids", "zeros", "null"],
)  # fmt: skip
async def test_hostile_json_is_a_400(served: Any, pipeline: Any, content: bytes) -> None:
    assert len(content) < MIN_REQUEST_BYTES
    async with httpx.AsyncClient(base_url=served.url, timeout=PATIENCE_S) as http:
        response = await http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert len(response.content) < 10_000
    assert pipeline.requests == []


# ---------------------------------------------------------------- time, and many at once


async def test_a_body_that_trickles_is_given_up() -> None:
    async def trickle() -> Message:
        await asyncio.sleep(0.01)
        return {"type": "http.request", "body": b"x", "more_body": True}

    guarded = BodyLimitMiddleware(read_all, BodyLimits(lambda: 10**9, 10**9, timeout_s=0.1))
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(HTTPException) as caught:
            await guarded(scope(), trickle, ignore)
    assert caught.value.status_code == 408


async def test_all_bodies_together_are_bounded_and_room_comes_back() -> None:
    gate = asyncio.Event()

    async def read_and_hold(scope: Scope, receive: Receive, send: Send) -> None:
        await read_all(scope, receive, send)
        await gate.wait()

    guarded = BodyLimitMiddleware(read_and_hold, BodyLimits(lambda: 100, 100, timeout_s=PATIENCE_S))
    holding = asyncio.create_task(guarded(scope(), body_of(60), ignore))
    await asyncio.sleep(0)
    with pytest.raises(HTTPException) as caught:
        await guarded(scope(), body_of(60), ignore)
    assert caught.value.status_code == 429
    gate.set()
    await holding
    await guarded(scope(), body_of(60), ignore)


def scope() -> Scope:
    return {"type": "http", "headers": []}


def body_of(num_bytes: int) -> Receive:
    async def receive() -> Message:
        return {"type": "http.request", "body": b"x" * num_bytes, "more_body": False}

    return receive


async def read_all(_: Scope, receive: Receive, __: Send) -> None:
    while (await receive())["more_body"]:
        pass


async def ignore(_: Message) -> None:
    pass


async def _send(caller: Caller, chunks: list[bytes]) -> None:
    for chunk in chunks:
        caller.writer.write(chunk)
        await caller.writer.drain()


async def _send_for_ever(caller: Caller, chunk: bytes) -> None:
    while True:
        await _send(caller, [chunk])


# ---------------------------------------------------------------- gRPC


@pytest.fixture
async def channel(frontend: Frontend) -> AsyncIterator[grpc.aio.Channel]:
    server = new_public_server(frontend.gate)
    pb_grpc.add_InferenceServicer_to_server(InferenceServicer(frontend), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with new_channel(f"127.0.0.1:{port}") as channel:
        yield channel
        responses = pb_grpc.InferenceStub(channel).Generate(pb.GenerateRequest(prompt="Hi"), timeout=PATIENCE_S)
        assert [response async for response in responses]  # it still serves
    await server.stop(None)


async def grpc_failure(channel: grpc.aio.Channel, message: bytes, metadata: Any = None) -> grpc.aio.AioRpcError:
    generate: Callable[..., Any] = channel.unary_stream("/pdserve.v1.Inference/Generate")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(message, timeout=PATIENCE_S, metadata=metadata).read()
    return caught.value


async def test_a_long_grpc_message_is_refused_by_its_size(channel: grpc.aio.Channel, pipeline: Any) -> None:
    long = pb.GenerateRequest(prompt="a " * MIB).SerializeToString()
    error = await grpc_failure(channel, long)
    assert isinstance(to_serving_error(error, "router"), InvalidRequest)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert pipeline.requests == []


async def test_a_grpc_message_beyond_all_bounds_is_not_received(channel: grpc.aio.Channel) -> None:
    error = await grpc_failure(channel, b"\x00" * (MAX_REQUEST_BYTES + 1))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_flood_of_grpc_metadata_is_refused(channel: grpc.aio.Channel) -> None:
    error = await grpc_failure(channel, b"", metadata=[(f"x-{i}", "y" * 1000) for i in range(200)])
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("message", [b"\x12\x02\xff\xfe", b"\xff" * 20, b"\x12\xff\xff\xff\xff\x0f", b"[" * 1000])
async def test_what_is_no_message_is_the_clients_mistake(
    channel: grpc.aio.Channel, pipeline: Any, message: bytes
) -> None:
    error = await grpc_failure(channel, message)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert isinstance(to_serving_error(error, "router"), InvalidRequest)
    assert pipeline.requests == []
