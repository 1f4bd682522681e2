"""What the OpenAPI document says of answers and refusals. Tests hold the real ones against it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict

Responses = dict[int | str, dict[str, Any]]

REFUSALS = {
    400: "The request is wrong; `param` names the field at fault.",
    401: "No API key, or one that is not known here.",
    404: "The model is not served here.",
    408: "The body did not arrive in time.",
    413: "The body is longer than any prompt that fits the model.",
    415: "The body is packed.",
    429: "Over a limit, or the queue is full; see `Retry-After`.",
    500: "Our mistake.",
    503: "No worker can serve it now; see `Retry-After`.",
    504: "The deadline has passed.",
}
BEARER = {"type": "http", "scheme": "bearer", "description": "Needed where the router has a file of API keys."}
HEADERS = [
    {
        "name": "X-Request-Priority",
        "in": "header",
        "description": "Among this caller's own waiting requests.",
        "schema": {"enum": ["high", "normal", "low"]},
    },
    {
        "name": "X-Request-Deadline-Ms",
        "in": "header",
        "description": "How long the client will wait, from arrival.",
        "schema": {"type": "integer", "minimum": 1, "maximum": 999_999_999_999},
    },
]


class Answered(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorDetail(Answered):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Answered):
    error: ErrorDetail


class PromptTokensDetails(Answered):
    cached_tokens: int


class UsageBody(Answered):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionChoice(Answered):
    index: Literal[0]
    text: str
    logprobs: None
    finish_reason: Literal["stop", "length"]


class CompletionAnswer(Answered):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody


class AssistantMessage(Answered):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Answered):
    index: Literal[0]
    message: AssistantMessage
    logprobs: None
    finish_reason: Literal["stop", "length"]


class ChatAnswer(Answered):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody


class ModelCard(Answered):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None


class ModelList(Answered):
    object: Literal["list"]
    data: list[ModelCard]


class Health(Answered):
    status: Literal["ready"]
    model: str


def answering(answer: type[BaseModel], *refusals: int) -> Responses:
    return {200: {"model": answer}, **_refused((*refusals, 500))}


def generating(answer: type[BaseModel]) -> Responses:
    """Whole, or with `stream` as server-sent events. Tools disagree whether a schema is of a stream or of an event."""
    what = "Server-sent events; the data of each is one of OpenAI's chunks, an error as the last one, or `[DONE]`."
    events = {"text/event-stream": {"schema": {"description": what}}}
    return {200: {"model": answer, "content": events}, **_refused(REFUSALS)}


def exposing(media_type: str) -> Responses:
    return {200: {"content": {media_type.partition(";")[0]: {"schema": {"type": "string"}}}}}


def add_document(app: FastAPI) -> None:
    """FastAPI's own, less the validation errors that it supposes: ours are 400."""
    made = app.openapi

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = made()
            for methods in document["paths"].values():
                for operation in methods.values():
                    operation["responses"].pop("422", None)
            schemas = document["components"]["schemas"]
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
            document["components"]["securitySchemes"] = {"bearer": BEARER}
            document["security"] = [{"bearer": []}, {}]
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]  # as FastAPI's manual has it


def _refused(statuses: Iterable[int]) -> Responses:
    return {status: {"model": ErrorBody, "description": REFUSALS[status]} for status in statuses}
