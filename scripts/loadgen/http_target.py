"""Load over HTTP: any server that streams OpenAI's completions or chat completions."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

import httpx

from loadgen.record import Delta, RequestFailed, ServerTimings, Unreachable
from loadgen.sse import sse_data
from loadgen.workload import PlannedRequest

CONNECT_TIMEOUT_S = 10.0
PDSERVE = "pdserve"  # the owner that its models name


class Endpoint(StrEnum):
    COMPLETIONS = "completions"
    CHAT = "chat"


class HttpTarget:
    """One server's base URL, with or without /v1."""

    def __init__(
        self,
        url: str,
        endpoint: Endpoint,
        model: str | None = None,
        api_key: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """tls: whom an https:// server is trusted by; None: the system's authorities."""
        self.label = url
        self._base_url = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._endpoint = endpoint
        self._model = model
        self._tells_timings = False
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=None,  # the runner bounds every request
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            verify=tls or ssl.create_default_context(),
            trust_env=False,  # the server is measured, not a proxy on the way
        )

    async def connect(self) -> None:
        try:
            response = await self._client.get(f"{self._base_url}/models", timeout=CONNECT_TIMEOUT_S)
        except httpx.TransportError as error:
            raise Unreachable(f"no server at {self.label}: {error or type(error).__name__}") from error
        try:
            card: dict[str, Any] = response.json()["data"][0]
            self._model = self._model or str(card["id"])
            self._tells_timings = card.get("owned_by") == PDSERVE
        except (ValueError, KeyError, IndexError, TypeError) as error:
            if self._model is None:
                raise Unreachable(
                    f"{self.label} does not list its models (HTTP {response.status_code}); name one with --model"
                ) from error

    async def stream(self, request: PlannedRequest) -> AsyncGenerator[Delta, None]:
        with _failures():
            path = "chat/completions" if self._endpoint is Endpoint.CHAT else "completions"
            async with self._client.stream("POST", f"{self._base_url}/{path}", json=self._body(request)) as response:
                if response.status_code != httpx.codes.OK:
                    raise _refusal(response.status_code, await response.aread())
                async for data in sse_data(response.aiter_bytes()):
                    if data == "[DONE]":
                        return
                    yield _delta(data)
        raise RequestFailed("stream ended early", "no [DONE] before the connection closed")

    async def close(self) -> None:
        await self._client.aclose()

    def _body(self, request: PlannedRequest) -> dict[str, Any]:
        if self._endpoint is Endpoint.CHAT:
            prompt: dict[str, Any] = {"messages": [{"role": "user", "content": request.prompt}]}
        else:
            prompt = {"prompt": request.prompt}
        return {
            **prompt,
            "model": self._model,
            "max_tokens": request.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            # others refuse an option that they do not know
            "stream_options": {"include_usage": True} | ({"include_timings": True} if self._tells_timings else {}),
        }


@contextmanager
def _failures() -> Iterator[None]:
    """httpx's ways to fail, as kinds of failed requests."""
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise RequestFailed("cannot connect", str(error)) from error
    except httpx.TransportError as error:
        raise RequestFailed("connection broken", str(error) or type(error).__name__) from error


def _refusal(status: int, body: bytes) -> RequestFailed:
    try:
        error = json.loads(body)["error"]
        return RequestFailed(f"HTTP {status} {_error_code(error)}".rstrip(), str(error["message"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        return RequestFailed(f"HTTP {status}", body[:200].decode("utf-8", errors="replace"))


def _error_code(error: dict[str, Any]) -> str:
    code = error.get("code")
    return code if isinstance(code, str) else str(error.get("type") or "")


def _delta(data: str) -> Delta:
    try:
        event: dict[str, Any] = json.loads(data)
        if "error" in event:
            raise RequestFailed(f"stream error {_error_code(event['error'])}".rstrip(), event["error"]["message"])
        usage = event.get("usage") or {}
        choices = event.get("choices") or []  # none: an account of the whole answer
        return Delta(
            num_tokens=int(bool(choices) and _carries_a_token(choices[0])),
            is_end=any(choice.get("finish_reason") for choice in choices),
            input_tokens=usage.get("prompt_tokens"),
            output_tokens=usage.get("completion_tokens"),
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            timings=_timings(event["timings"]) if event.get("timings") else None,
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RequestFailed("malformed event", f"{data[:200]}: {error}") from error


def _timings(timings: dict[str, Any]) -> ServerTimings:
    return ServerTimings(
        stages={str(name): float(seconds) for name, seconds in timings["stages"].items()},
        prefill_worker=timings["prefill_worker"],
        decode_worker=timings["decode_worker"],
        attempts=timings["attempts"],
    )


def _carries_a_token(choice: dict[str, Any]) -> bool:
    """Text is a token's; so is an event without text that is neither chat's opening (a role) nor the end."""
    delta = choice.get("delta", {})
    text = choice.get("text") or delta.get("content") or delta.get("reasoning_content")
    return bool(text) or not (delta.get("role") or choice.get("finish_reason"))
