"""OpenAI's HTTP API, plus /health and, where only this machine can call, what is in router/admin_pages.py."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from common.errors import InvalidRequest, UnknownModel, WorkerUnavailable
from common.tracing import carrier_of
from router.admin_pages import AdminPages
from router.answer import AnswerDelta
from router.frontend import Frontend
from router.http_errors import add_error_handlers
from router.http_gate import GateMiddleware
from router.http_middleware import BodyLimitMiddleware, BodyLimits, RequestIdMiddleware
from router.openai_answers import AnswerHead, AnswerShape, ChatShape, CompletionShape, JsonObject, accounts, model_card
from router.openai_schema import ChatBody, CompletionBody, StreamOptions
from router.openapi import (
    HEADERS,
    ChatAnswer,
    CompletionAnswer,
    Health,
    ModelCard,
    ModelList,
    add_document,
    answering,
    generating,
)
from router.priority_lanes import Priority
from router.sse import EventStream, unless_disconnected

BODY_TIMEOUT_S = 30.0
MAX_BODIES_BYTES = 256 * 1024 * 1024  # all bodies that are held at once
PRIORITY_HEADER = "X-Request-Priority"
DEADLINE_HEADER = "X-Request-Deadline-Ms"  # how long the client will wait, from arrival
DEADLINE_DIGITS = 12
_DEADLINE = re.compile(rf"0*[1-9][0-9]{{0,{DEADLINE_DIGITS - 1}}}", re.ASCII)


def create_app(frontend: Frontend, admin_pages: AdminPages | None = None) -> FastAPI:
    """An ASGI app. It holds no state of its own and starts nothing. admin_pages: None where strangers may call."""
    app = FastAPI(title="pdserve")
    app.add_middleware(
        BodyLimitMiddleware, limits=BodyLimits(frontend.max_request_bytes, MAX_BODIES_BYTES, BODY_TIMEOUT_S)
    )
    app.add_middleware(GateMiddleware, gate=frontend.gate)
    app.add_middleware(RequestIdMiddleware)  # the outermost
    add_error_handlers(app)
    created = int(time.time())

    @app.post("/v1/completions", responses=generating(CompletionAnswer), openapi_extra={"parameters": HEADERS})
    async def complete(body: CompletionBody, request: Request) -> Response:
        return await _answer(frontend, request, body, CompletionShape)

    @app.post("/v1/chat/completions", responses=generating(ChatAnswer), openapi_extra={"parameters": HEADERS})
    async def chat(body: ChatBody, request: Request) -> Response:
        return await _answer(frontend, request, body, ChatShape)

    @app.get("/v1/models", response_model=None, responses=answering(ModelList, 401))
    async def list_models() -> JsonObject:
        return {"object": "list", "data": [model_card(frontend.model, created)]}

    @app.get("/v1/models/{name:path}", response_model=None, responses=answering(ModelCard, 401, 404))
    async def describe_model(name: str) -> JsonObject:
        if name != frontend.model.name:
            raise UnknownModel(f"the model {name!r} is not served here; {frontend.model.name!r} is", param="model")
        return model_card(frontend.model, created)

    @app.get("/health", response_model=None, responses=answering(Health, 503))
    async def health() -> JsonObject:
        """200 exactly when a request sent now can be served."""
        if (reason := frontend.model.workers.not_ready_reason()) is not None:
            raise WorkerUnavailable(reason)
        return {"status": "ready", "model": frontend.model.name}

    if admin_pages is not None:
        admin_pages.add_to(app)
    add_document(app)
    return app


async def _answer(
    frontend: Frontend,
    http: Request,
    body: CompletionBody | ChatBody,
    shape_of: Callable[[AnswerHead], AnswerShape],
) -> Response:
    wish = replace(body.wish(_timeout_s(http)), priority=_priority(http), caller=carrier_of(http.headers.items()))
    request = await frontend.accept(wish, http.state.request_id, http.state.tenant)
    shape = shape_of(AnswerHead(request.request_id, frontend.model.name, body.includes_usage))
    deltas = frontend.answer(request, wish)
    if body.stream:
        closing = partial(accounts, body.stream_options or StreamOptions(), request)
        return EventStream(_chunks(deltas, shape, closing), request.deadline_s)
    return JSONResponse(await unless_disconnected(http.receive, _whole(deltas, shape)))


async def _whole(deltas: AsyncGenerator[AnswerDelta, None], shape: AnswerShape) -> JsonObject:
    texts: list[str] = []
    async with aclosing(deltas):
        async for delta in deltas:
            texts.append(delta.text)
    return shape.whole("".join(texts), delta.finish_reason, delta.usage)


async def _chunks(
    deltas: AsyncGenerator[AnswerDelta, None], shape: AnswerShape, closing: Callable[[AnswerDelta], JsonObject]
) -> AsyncGenerator[JsonObject, None]:
    """A chunk for each piece of text. Nothing before the first token: until then a failure can have its own status."""
    is_open = False
    async with aclosing(deltas):
        async for delta in deltas:
            if not is_open:
                is_open = True
                for chunk in shape.opening():
                    yield chunk
            if delta.text or delta.finish_reason is not None:
                yield shape.chunk(delta.text, delta.finish_reason)
    if told := closing(delta):
        yield shape.closing_chunk(told)


def _timeout_s(http: Request) -> float | None:
    given = http.headers.get(DEADLINE_HEADER)
    if given is None:
        return None
    if not _DEADLINE.fullmatch(given):
        message = (
            f"{DEADLINE_HEADER} must be a whole number of milliseconds above 0, of at most {DEADLINE_DIGITS} digits"
        )
        raise InvalidRequest(message, param=DEADLINE_HEADER)
    return int(given) / 1000


def _priority(http: Request) -> Priority:
    given = http.headers.get(PRIORITY_HEADER, Priority.NORMAL)
    try:
        return Priority(given)
    except ValueError:
        raise InvalidRequest(f"{PRIORITY_HEADER} must be high, normal or low", param=PRIORITY_HEADER) from None
