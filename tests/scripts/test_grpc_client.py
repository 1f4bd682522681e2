"""grpc_client.py as a person runs it."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from common.errors import PromptTooLong
from common.pb import serving_pb2 as pb

SCRIPT = Path(__file__).parents[2] / "scripts" / "grpc_client.py"


async def started(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, SCRIPT, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )


async def finished(*arguments: str) -> tuple[int | None, str, str]:
    process = await started(*arguments)
    async with asyncio.timeout(30):
        output, errors = await process.communicate()
    return process.returncode, output.decode(), errors.decode()


async def test_it_streams_a_chat_answer_and_ends_with_the_timings(grpc_server) -> None:
    status, output, errors = await finished("Why?", "--address", grpc_server.address, "--max-tokens", "3")
    assert (status, errors) == (0, "")
    assert output.splitlines() == [
        " word word.",
        "",
        "0 tokens in, 3 out (length), decode-0",
        "queue 1.0 ms  decode 19.0 ms",
        "TTFT 1.0 ms  TPOT 2.0 ms  end to end 20.0 ms",
    ]
    message = grpc_server.requests[0].chat.messages[0]
    assert (message.role, message.content) == ("user", "Why?")


async def test_it_names_the_typed_error(grpc_server) -> None:
    async def refuses(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        raise PromptTooLong("9000 tokens, at most 8192")
        yield

    grpc_server.answer = refuses
    status, _, errors = await finished("Why?", "--address", grpc_server.address)
    assert status == 1
    assert errors.strip() == "PromptTooLong: 9000 tokens, at most 8192"


async def test_the_deadline_ends_it(grpc_server) -> None:
    async def stalls(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        await asyncio.Event().wait()
        yield

    grpc_server.answer = stalls
    status, _, errors = await finished("Why?", "--address", grpc_server.address, "--timeout", "0.5")
    assert status == 1
    assert errors.strip().startswith("DEADLINE_EXCEEDED")


async def test_ctrl_c_cancels_the_call_on_the_server(grpc_server) -> None:
    has_begun, has_left = asyncio.Event(), asyncio.Event()

    async def stalls(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        yield pb.GenerateResponse(text="Well", token_ids=[1])
        has_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            has_left.set()

    grpc_server.answer = stalls
    process = await started("Why?", "--address", grpc_server.address)
    async with asyncio.timeout(30):
        assert await process.stdout.readexactly(4) == b"Well"
        await has_begun.wait()
        process.send_signal(signal.SIGINT)
        _, errors = await process.communicate()
        await has_left.wait()
    assert process.returncode == 130
    assert errors.decode().strip() == "cancelled"


async def test_no_server_is_one_line(free_port: int) -> None:
    status, _, errors = await finished("Why?", "--address", f"127.0.0.1:{free_port}")
    assert status == 1
    assert errors.strip().startswith("UNAVAILABLE")
    assert errors.strip().count("\n") == 0


@pytest.mark.parametrize("arguments", [[], ["Why?", "--timeout", "-1"], ["Why?", "--max-tokens", "0"]])
async def test_bad_usage_is_exit_2(arguments: list[str]) -> None:
    status, _, errors = await finished(*arguments)
    assert status == 2
    assert "usage" in errors
