"""Every HTTP mistake and failure in OpenAI's error shape."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from common.errors import InvalidRequest, Overloaded, ServingError, Unauthorized
from router.openai_answers import error_body

CLIENT_CLOSED_REQUEST = 499  # nobody reads it; nginx's number, for logs


def add_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(ServingError, _serving_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(ClientDisconnect, _client_left)
    app.add_exception_handler(Exception, _bug)  # the server logs the traceback after this has answered


def error_response(error: ServingError) -> Response:
    headers = {} if error.retry_after_s is None else {"Retry-After": str(math.ceil(error.retry_after_s))}
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    return _json(error, error.http_status, headers)


def request_timeout(message: str) -> Response:
    """For a request that does not arrive."""
    return _json(InvalidRequest(message), 408)


async def _serving_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ServingError)
    return error_response(error)


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return await _serving_error(request, _describe(error.errors()))


# What the framework says of a body that it could not even decode.
UNREADABLE = "There was an error parsing the body"


async def _http_exception(request: Request, error: Exception) -> Response:
    """Raised by the framework, or where it lets only its own errors through: no such path, a body that is too large."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    if error.status_code == Overloaded.http_status:
        return error_response(Overloaded(message))
    if error.detail == UNREADABLE:
        message = "the body must be JSON in UTF-8, and not nested hundreds of levels deep"
    return _json(InvalidRequest(message), error.status_code, error.headers)


async def _client_left(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _bug(_: Request, __: Exception) -> Response:
    return _json(ServingError("internal error"), ServingError.http_status)


def _json(error: ServingError, status: int, headers: Mapping[str, str] | None = None) -> Response:
    # ASCII: a message may quote a client's text that is not valid Unicode
    return Response(json.dumps(error_body(error)), status, headers, media_type="application/json")


def _describe(problems: Sequence[Any]) -> InvalidRequest:
    """The first problem; for a field that may be of several types, what each of them would need."""
    first: Mapping[str, Any] = problems[0]
    if first["type"] == "json_invalid":
        return InvalidRequest(f"the body is not valid JSON: {first['ctx']['error']} at position {first['loc'][1]}")
    field = _field(first)
    if not field:
        return InvalidRequest("the body must be a JSON object, sent with Content-Type: application/json")
    needs = list(dict.fromkeys(problem["msg"] for problem in problems if _field(problem) == field))
    return InvalidRequest(f"{field}: {'; or: '.join(needs)}", param=field)


def _field(problem: Mapping[str, Any]) -> str:
    """`temperature`, or `messages.0.role`; without the names of types that pydantic adds inside unions."""
    path = problem["loc"][1:]
    is_union_tag = [isinstance(part, str) and (not part.isidentifier() or part in _TYPE_NAMES) for part in path]
    end = is_union_tag.index(True) if True in is_union_tag else len(path)
    return ".".join(str(part) for part in path[:end])


_TYPE_NAMES = {"str", "TextPart", "OtherPart"}
