"""Two tiny real servers whose answers a test scripts, token by token."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from common.pb import serving_pb2 as pb
from common.pb.serving_pb2_grpc import InferenceServicer, add_InferenceServicer_to_server
from common.rpc import answering, new_server


class OpenAIServer:
    """Streams whatever `answer(body)` yields, or answers `refusal` when one is set."""

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.owner = "somebody"
        self.refusal: Response | None = None
        self.answer: Callable[[dict[str, Any]], AsyncIterator[str]] = self.whole_answer
        self.app = FastAPI()
        self.app.get("/v1/models")(self._models)
        self.app.post("/v1/completions")(self._generate)
        self.app.post("/v1/chat/completions")(self._generate)

    async def whole_answer(self, body: dict[str, Any]) -> AsyncIterator[str]:
        for _ in range(body["max_tokens"]):
            yield self.token(" word")
        yield self.usage(self.num_input_tokens(body), body["max_tokens"])
        yield self.done

    done = "data: [DONE]\n\n"

    @staticmethod
    def token(text: str, finish_reason: str | None = None) -> str:
        return f"data: {json.dumps({'choices': [{'text': text, 'finish_reason': finish_reason}]})}\n\n"

    @staticmethod
    def usage(prompt_tokens: int, completion_tokens: int) -> str:
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
        return f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"

    @staticmethod
    def num_input_tokens(body: dict[str, Any]) -> int:
        return len(body["prompt"] if "prompt" in body else body["messages"][0]["content"].split())

    async def _models(self) -> dict[str, Any]:
        return {"data": [{"id": "tiny", "owned_by": self.owner}]}

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        return self.refusal or StreamingResponse(self.answer(body), media_type="text/event-stream")


class GrpcServer(InferenceServicer):
    """Streams whatever `answer(request)` yields; a ServingError raised there ends the call with its type."""

    def __init__(self) -> None:
        self.address = ""
        self.requests: list[pb.GenerateRequest] = []
        self.num_cancelled = 0
        self.answer: Callable[[pb.GenerateRequest], AsyncIterator[pb.GenerateResponse]] = self.whole_answer

    async def whole_answer(self, request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        num_tokens = request.sampling.max_tokens
        for token_id in range(num_tokens - 1):
            yield pb.GenerateResponse(text=" word", token_ids=[token_id])
        usage = pb.Usage(prompt_tokens=len(request.prompt_token_ids.ids), completion_tokens=num_tokens)
        stages = [pb.Stage(name="queue", seconds=0.001), pb.Stage(name="decode", seconds=0.019)]
        timings = pb.Timings(stages=stages, ttft_s=0.001, tpot_s=0.002, end_to_end_s=0.02, decode_worker="decode-0")
        yield pb.GenerateResponse(text=".", token_ids=[9], finish_reason="length", usage=usage, timings=timings)

    async def Generate(self, request, context):
        self.requests.append(request)
        async with answering(context):
            try:
                async for response in self.answer(request):
                    yield response
            except asyncio.CancelledError:
                self.num_cancelled += 1
                raise

    async def ListModels(self, request, context):
        return pb.ListModelsResponse(models=["tiny"])


@pytest.fixture
async def openai_server() -> AsyncIterator[OpenAIServer]:
    served = OpenAIServer()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        served.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = uvicorn.Server(uvicorn.Config(served.app, log_level="critical", timeout_graceful_shutdown=1))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        yield served
        server.should_exit = True
        await task


@pytest.fixture
async def grpc_server() -> AsyncIterator[GrpcServer]:
    served = GrpcServer()
    server = new_server()
    add_InferenceServicer_to_server(served, server)
    served.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield served
    await server.stop(grace=0)


@pytest.fixture
def queue_full() -> JSONResponse:
    error = {"message": "256 requests wait already", "type": "overloaded_error", "code": "queue_full", "param": None}
    return JSONResponse({"error": error}, status_code=429, headers={"Retry-After": "1"})


@pytest.fixture
def free_port() -> int:
    """A port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
