"""Connections that say nothing, say half of it, or never listen: they cost little, and the next client is served."""

from __future__ import annotations

import asyncio
import resource
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from common.pb import serving_pb2 as pb
from common.pb import serving_pb2_grpc as pb_grpc
from common.process import allow_many_connections
from common.rpc import new_channel
from router import http_server
from router.frontend import Frontend
from router.grpc_api import InferenceServicer
from router.grpc_server import new_public_server
from tests.router.test_hostile_input import HEAD, MIB, PATIENCE_S, call, still_serves

NUM_IDLE = 10_000
SPARE_DESCRIPTORS = 500
IDLER = """
import resource, socket, sys
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
idle = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(int(sys.argv[2]))]
print(len(idle), flush=True)
sys.stdin.read()
"""


@pytest.fixture
async def grpc_address(frontend: Frontend) -> AsyncIterator[str]:
    server = new_public_server(frontend.gate)
    pb_grpc.add_InferenceServicer_to_server(InferenceServicer(frontend), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


async def still_serves_grpc(address: str) -> None:
    async with new_channel(address) as channel:
        responses = pb_grpc.InferenceStub(channel).Generate(pb.GenerateRequest(prompt="Hi"), timeout=PATIENCE_S)
        assert [response async for response in responses]


# ---------------------------------------------------------------- nothing said


@asynccontextmanager
async def idle_connections(port: int, number: int) -> AsyncIterator[None]:
    """Held by a process of their own: it has its own limit of open files."""
    pipe = asyncio.subprocess.PIPE
    idler = await asyncio.create_subprocess_exec(
        sys.executable, "-c", IDLER, str(port), str(number), stdin=pipe, stdout=pipe
    )
    try:
        async with asyncio.timeout(PATIENCE_S):
            assert idler.stdout is not None
            assert int(await idler.stdout.readline()) == number
        yield
    finally:
        idler.kill()
        await idler.wait()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("api", ["http", "grpc"])
async def test_ten_thousand_idle_connections_take_little_and_the_next_client_is_served(
    served: Any, grpc_address: str, api: str
) -> None:
    allow_many_connections()
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < NUM_IDLE + SPARE_DESCRIPTORS:
        pytest.skip(f"a process may open {most} files here; this needs {NUM_IDLE + SPARE_DESCRIPTORS}")
    port = httpx.URL(served.url).port if api == "http" else int(grpc_address.rpartition(":")[2])
    before = resident_bytes()
    async with idle_connections(port, NUM_IDLE):
        await still_serves(served.url)
        await still_serves_grpc(grpc_address)
        assert resident_bytes() - before < NUM_IDLE * 40_000
    await still_serves(served.url)
    await still_serves_grpc(grpc_address)


# ---------------------------------------------------------------- half of it


@pytest.fixture
def short_patience(monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(http_server, "HEAD_TIMEOUT_S", 0.2)
    return 0.2


async def test_a_connection_that_says_nothing_is_closed(short_patience: float, served: Any) -> None:
    async with call(served.url) as caller:
        await caller.end()
    await still_serves(served.url)


async def test_half_a_head_is_answered_as_one_that_did_not_arrive(short_patience: float, served: Any) -> None:
    async with call(served.url) as caller:
        caller.writer.write(HEAD)
        answer = await caller.answer()
        await caller.end()
    assert answer.status == 408
    assert answer.error["type"] == "invalid_request_error"
    await still_serves(served.url)


async def test_a_head_that_trickles_gains_no_time(short_patience: float, served: Any) -> None:
    async with call(served.url) as caller:
        trickling = asyncio.create_task(trickle(caller.writer))
        assert (await caller.answer()).status == 408
        await caller.end()
        await asyncio.wait_for(asyncio.gather(trickling, return_exceptions=True), PATIENCE_S)


async def trickle(writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD)
    while True:
        writer.write(b"X-A: b\r\n")
        await writer.drain()
        await asyncio.sleep(0.01)


async def test_half_a_second_request_is_given_up_too(short_patience: float, served: Any) -> None:
    async with call(served.url) as caller:
        caller.writer.write(b"GET /v1/nothing HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await caller.answer()).status == 404
        caller.writer.write(HEAD)
        assert (await caller.answer()).status == 408
        await caller.end()


async def test_an_answer_that_takes_longer_than_a_head_may_is_not_cut(
    short_patience: float, served: Any, pipeline: Any
) -> None:
    pipeline.break_at = 1  # waits for ever
    async with httpx.AsyncClient(base_url=served.url) as http:
        with pytest.raises(httpx.ReadTimeout):
            await http.post("/v1/completions", json={"prompt": "Hi"}, timeout=4 * short_patience)
    assert pipeline.waiting.is_set()


# ---------------------------------------------------------------- never listens


NUM_TOKENS = 200_000  # more than the kernel's and gRPC's buffers take
STREAM = b'{"prompt": "Hi", "max_tokens": %d, "stream": true}' % NUM_TOKENS


async def test_a_client_that_never_reads_its_stream_holds_back_the_tokens_not_the_memory(
    served: Any, pipeline: Any, limits: Any
) -> None:
    limits.context = 2 * NUM_TOKENS
    pipeline.token_ids = [905] * NUM_TOKENS
    async with call(served.url) as caller:
        caller.stop_reading()
        before = resident_bytes()
        caller.writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(STREAM) + STREAM)
        num_sent = await settled(pipeline)
        grown_bytes = resident_bytes() - before
    assert 0 < num_sent < NUM_TOKENS
    assert grown_bytes < 64 * MIB
    await asyncio.wait_for(pipeline.closed.wait(), PATIENCE_S)  # the client has left, and its request with it


async def test_a_grpc_client_that_never_reads_its_stream_holds_back_the_tokens_too(
    grpc_address: str, pipeline: Any, limits: Any
) -> None:
    limits.context = 2 * NUM_TOKENS
    pipeline.token_ids = [905] * NUM_TOKENS
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536)]  # or gRPC buffers for it at length
    async with grpc.aio.insecure_channel(grpc_address, options=options) as channel:
        sampling = pb.SamplingParams(max_tokens=NUM_TOKENS)
        before = resident_bytes()
        stream = pb_grpc.InferenceStub(channel).Generate(pb.GenerateRequest(prompt="Hi", sampling=sampling))
        await stream.read()
        num_sent = await settled(pipeline)
        grown_bytes = resident_bytes() - before
    assert 0 < num_sent < NUM_TOKENS
    assert grown_bytes < 64 * MIB
    await asyncio.wait_for(pipeline.closed.wait(), PATIENCE_S)


async def settled(pipeline: Any) -> int:
    """How many tokens were sent once no more are."""
    async with asyncio.timeout(PATIENCE_S):
        before = -1
        while pipeline.num_sent == 0 or pipeline.num_sent != before:
            before = pipeline.num_sent
            await asyncio.sleep(0.3)
    return before
