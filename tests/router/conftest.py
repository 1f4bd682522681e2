"""The router's own surfaces, served for real, over a pipeline that replays given token ids."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from fastapi import FastAPI

from common.config import DEFAULT_MODEL
from common.errors import ServingError
from common.lifecycle import State
from common.model_source import resolve_model
from common.pb import serving_pb2 as pb
from common.sampling import FinishReason
from router.admin_pages import AdminPages
from router.answer import ServedModel
from router.api import create_app
from router.cluster_metrics import ClusterCollector
from router.dashboard.state import Dashboard
from router.frontend import Frontend
from router.http_server import HttpServer
from router.metrics import RouterMetrics
from router.request import Request, TokenDelta
from router.tenant import Tenant
from router.tokenizer import Tokenizer, load_tokenizer

PATIENCE_S = 5.0


@dataclass
class ReplayPipeline:
    """Streams `token_ids`, cut at max_tokens. At index `break_at` it raises `error`, or waits for ever without one."""

    token_ids: Sequence[int] = (19556, 905)  # "Hello world"
    finish_reason: FinishReason | None = FinishReason.STOP
    break_at: int | None = None
    error: ServingError | None = None
    requests: list[Request] = field(default_factory=list)
    num_sent: int = 0
    waiting: asyncio.Event = field(default_factory=asyncio.Event)
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    def require_room(self, tenant: Tenant) -> None:
        """There always is."""

    async def serve(self, request: Request) -> AsyncGenerator[TokenDelta, None]:
        self.requests.append(request)
        request.prefill_worker, request.decode_worker, request.attempts = "prefill-0", "decode-0", 1
        for state in (State.RESERVING, State.PREFILLING):
            request.timeline.enter(state)
        try:
            for index, token_id in enumerate(self.token_ids):
                await self._perhaps_break(index)
                self.num_sent += 1
                request.timeline.count_token()
                if request.timeline.num_output_tokens == request.sampling.max_tokens:
                    yield TokenDelta(token_id, FinishReason.LENGTH)
                    break
                yield TokenDelta(token_id, self.finish_reason if index == len(self.token_ids) - 1 else None)
            await self._perhaps_break(len(self.token_ids))
            request.timeline.enter(State.FINISHED)
        finally:
            self.closed.set()

    async def _perhaps_break(self, index: int) -> None:
        if index == self.break_at:
            self.waiting.set()
            if self.error is not None:
                raise self.error
            await asyncio.Event().wait()


@dataclass
class FixedLimits:
    """What registered workers would have said."""

    context: int | None = 512
    vocabulary: int | None = 49152
    reason: str | None = None

    def max_model_len(self) -> int | None:
        return self.context

    def vocab_size(self) -> int | None:
        return self.vocabulary

    def not_ready_reason(self) -> str | None:
        return self.reason

    async def until_ready(self) -> None:
        return


@dataclass
class Served:
    """One router's public face and what is behind it."""

    url: str
    pipeline: ReplayPipeline
    limits: FixedLimits
    frontend: Frontend


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_model(DEFAULT_MODEL))


@pytest.fixture
def pipeline() -> ReplayPipeline:
    return ReplayPipeline()


@pytest.fixture
def limits() -> FixedLimits:
    return FixedLimits()


@pytest.fixture
def frontend(pipeline: ReplayPipeline, limits: FixedLimits, tokenizer: Tokenizer) -> Frontend:
    return Frontend(pipeline, tokenizer, ServedModel("tiny", limits), request_timeout_s=60)


@pytest.fixture
def app(frontend: Frontend) -> FastAPI:
    return create_app(frontend, admin_pages())


@pytest.fixture
async def served(
    app: FastAPI, frontend: Frontend, pipeline: ReplayPipeline, limits: FixedLimits
) -> AsyncIterator[Served]:
    async with running(app) as url:
        yield Served(url, pipeline, limits, frontend)


@pytest.fixture
def soon() -> Callable[[Awaitable[object]], Awaitable[object]]:
    """Wait for something that must happen, with a bound."""
    return lambda awaited: asyncio.wait_for(awaited, PATIENCE_S)


def admin_pages(status: Callable[[], pb.ClusterStatus] = pb.ClusterStatus) -> AdminPages:
    """Of a router whose workers are those of `status`."""
    registry = RouterMetrics().registry
    registry.register(ClusterCollector(status))
    return AdminPages(registry, status, Dashboard(status, registry, list))


@asynccontextmanager
async def running(app: FastAPI, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()  # clients that come before the server has started wait in its backlog
        host, port = listener.getsockname()
        server = HttpServer(app, tls)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield f"{'https' if tls else 'http'}://{host}:{port}"
        finally:
            server.should_exit = True
            await asyncio.wait_for(serving, PATIENCE_S)
