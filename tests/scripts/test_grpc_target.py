from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from common.errors import QueueFull, WorkerLost
from common.pb import serving_pb2 as pb
from loadgen.grpc_target import GrpcTarget
from loadgen.record import RequestRecord, ServerTimings, Unreachable
from loadgen.runner import measure
from loadgen.workload import PlannedRequest

IDS = PlannedRequest(0.0, [301, 302, 303], input_tokens=3, output_tokens=4)
TEXT = PlannedRequest(0.0, "two words", input_tokens=2, output_tokens=4)


async def send(address: str, request: PlannedRequest = IDS, timeout_s: float = 10.0) -> RequestRecord:
    target = GrpcTarget(address)
    try:
        await target.connect()
        return await measure(request, target, time.perf_counter(), timeout_s)
    finally:
        await target.close()


async def test_token_ids_are_sent_with_exact_lengths_and_measured(grpc_server) -> None:
    record = await send(grpc_server.address)
    sent = grpc_server.requests[0]
    assert list(sent.prompt_token_ids.ids) == [301, 302, 303]
    assert (sent.sampling.max_tokens, sent.sampling.ignore_eos, sent.sampling.temperature) == (4, True, 0)
    assert record.is_completed
    assert (record.input_tokens, record.output_tokens, len(record.token_event_s)) == (3, 4, 4)


async def test_the_routers_timings_are_kept(grpc_server) -> None:
    record = await send(grpc_server.address)
    assert record.timings == ServerTimings({"queue": 0.001, "decode": 0.019}, "", "decode-0", 0)


async def test_text_is_sent_as_text(grpc_server) -> None:
    assert (await send(grpc_server.address, TEXT)).is_completed
    assert grpc_server.requests[0].prompt == "two words"


async def test_a_message_of_several_tokens_counts_each(grpc_server) -> None:
    async def bursts(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        yield pb.GenerateResponse(token_ids=[1, 2, 3])
        yield pb.GenerateResponse(token_ids=[4], finish_reason="length")

    grpc_server.answer = bursts
    record = await send(grpc_server.address)
    assert (record.output_tokens, len(record.token_event_s)) == (4, 2)


async def test_tokens_are_stamped_when_they_come(grpc_server) -> None:
    has_first, may_send_second = asyncio.Event(), asyncio.Event()

    async def gated(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        yield pb.GenerateResponse(token_ids=[1])
        has_first.set()
        await may_send_second.wait()
        yield pb.GenerateResponse(token_ids=[2], finish_reason="length")

    grpc_server.answer = gated
    sending = asyncio.create_task(send(grpc_server.address))
    async with asyncio.timeout(5):
        await has_first.wait()
        released_s = time.perf_counter()
        may_send_second.set()
        record = await sending
    assert record.token_event_s[1] > released_s


async def test_a_typed_error_is_counted_by_status_and_type(grpc_server) -> None:
    async def refuses(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        raise QueueFull("256 requests wait already")
        yield

    grpc_server.answer = refuses
    record = await send(grpc_server.address)
    assert (record.failure.kind, record.failure.detail) == (
        "grpc RESOURCE_EXHAUSTED QueueFull",
        "256 requests wait already",
    )


async def test_an_error_after_the_first_token_is_a_failure(grpc_server) -> None:
    async def dies(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        yield pb.GenerateResponse(token_ids=[1])
        raise WorkerLost("decode-0 died")

    grpc_server.answer = dies
    record = await send(grpc_server.address)
    assert record.failure.kind == "grpc UNAVAILABLE WorkerLost"
    assert len(record.token_event_s) == 1


async def test_a_stream_without_its_end_is_a_failure(grpc_server) -> None:
    async def silent_end(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        yield pb.GenerateResponse(token_ids=[1])

    grpc_server.answer = silent_end
    assert (await send(grpc_server.address)).failure.kind == "stream ended early"


async def test_a_timeout_cancels_the_call_on_the_server(grpc_server) -> None:
    has_left = asyncio.Event()

    async def stalls(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        try:
            await asyncio.Event().wait()
        finally:
            has_left.set()
        yield

    grpc_server.answer = stalls
    assert (await send(grpc_server.address, timeout_s=0.2)).failure.kind == "timeout"
    async with asyncio.timeout(5):
        await has_left.wait()


async def test_no_server_is_one_clear_line(free_port: int) -> None:
    with pytest.raises(Unreachable, match=f"no server at grpc://127.0.0.1:{free_port}: UNAVAILABLE"):
        await send(f"127.0.0.1:{free_port}")
