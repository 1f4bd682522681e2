"""A client over HTTP streaming that does what a client library does when its server goes away: it sends again."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx

from chaoslab.asks import Answer, Ask
from chaoslab.outcome import Break, Ending, Failure, Outcome
from common.errors import WorkerDraining
from loadgen.sse import sse_data
from router.api import DEADLINE_HEADER
from router.http_middleware import HEADER as REQUEST_ID_HEADER

MARGIN_S = 10.0  # after its deadline an answer may come late from a router that stood still meanwhile
PAUSE_S = 0.2  # before a request is sent again


class Client:
    """Nothing else is ever sent again: a typed error is the end, also one that says to retry."""

    def __init__(self, url: str, model: str, deadline_s: float) -> None:
        self._url = f"{url}/v1/completions"
        self._model = model
        self._deadline_s = deadline_s
        self._http = httpx.AsyncClient(
            timeout=None,  # every request has a deadline
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),  # each answer has its own
            trust_env=False,
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def send(self, ask: Ask, outcome: Outcome, leaves_after: int | None = None) -> None:
        """Follow an answer to its end, or for `leaves_after` pieces of text. Never raises for what the system does."""
        deadline_s = outcome.sent_s + self._deadline_s
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + self._deadline_s + MARGIN_S):
                await self._until_answered(ask, outcome, leaves_after, deadline_s)
        except TimeoutError:
            outcome.ending = Ending.HUNG
        outcome.end_s = time.monotonic()

    async def _until_answered(self, ask: Ask, outcome: Outcome, leaves_after: int | None, deadline_s: float) -> None:
        while True:
            try_s = time.monotonic()
            try:
                outcome.ending = await self._once(ask, outcome, leaves_after, deadline_s)
                return
            except _RouterGone as gone:
                outcome.breaks.append(Break(time.monotonic(), str(gone), gone.is_typed))
            except _Failed as failed:
                outcome.failure = failed.failure
                outcome.ending = failed.failure.ending(time.monotonic() - try_s)
                return
            await asyncio.sleep(PAUSE_S)
            if time.monotonic() > deadline_s:
                outcome.failure = Failure("no router answered")
                outcome.ending = Ending.UNTYPED
                return

    async def _once(self, ask: Ask, outcome: Outcome, leaves_after: int | None, deadline_s: float) -> Ending:
        """Raises: _RouterGone, _Failed."""
        outcome.texts.clear()
        left_ms = max(1, round((deadline_s - time.monotonic()) * 1000))
        headers = {REQUEST_ID_HEADER: outcome.name, DEADLINE_HEADER: str(left_ms)}
        reading = _Reading(outcome)
        try:
            async with self._http.stream("POST", self._url, json=ask.body(self._model), headers=headers) as response:
                if response.status_code != httpx.codes.OK:
                    raise _error(_json(await response.aread()), response.status_code)
                async for data in sse_data(response.aiter_bytes()):
                    if data == "[DONE]":
                        return reading.end()
                    reading.note(_json(data))
                    if leaves_after is not None and len(outcome.texts) >= leaves_after and not reading.is_ended:
                        return Ending.LEFT
        except httpx.TransportError as error:
            raise _RouterGone(f"{type(error).__name__}: {error}", is_typed=False) from error
        raise _RouterGone("the stream ended without [DONE]", is_typed=False)


class _Reading:
    """The events of one answer."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._finish_reason: str | None = None
        self._usage: dict[str, Any] = {}

    @property
    def is_ended(self) -> bool:
        return self._finish_reason is not None

    def note(self, event: dict[str, Any]) -> None:
        """Raises: _RouterGone, _Failed."""
        if "error" in event:
            raise _error(event, None)
        self._usage = event.get("usage") or self._usage
        for choice in event.get("choices", ()):
            self._finish_reason = choice["finish_reason"]
            if choice["text"]:
                self._outcome.texts.append(choice["text"])
                self._outcome.first_text_s = self._outcome.first_text_s or time.monotonic()

    def end(self) -> Ending:
        """Raises: _Failed."""
        if self._finish_reason is None or not self._usage:
            raise _Failed(Failure("an answer without its finish reason or usage"))
        self._outcome.answer = Answer(
            "".join(self._outcome.texts),
            self._finish_reason,
            self._usage["prompt_tokens"],
            self._usage["completion_tokens"],
        )
        return Ending.COMPLETED


class _RouterGone(Exception):
    """The connection failed or broke, or the router said that it stops."""

    def __init__(self, why: str, *, is_typed: bool) -> None:
        super().__init__(why)
        self.is_typed = is_typed


class _Failed(Exception):
    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.code)
        self.failure = failure


def _error(body: dict[str, Any], status: int | None) -> _RouterGone | _Failed:
    """status: None where the error came as an event of a stream."""
    error = body.get("error", {})
    code = error.get("code") or f"HTTP {status} {error.get('type', '')}".strip()
    message = str(error.get("message", ""))
    if code == WorkerDraining.code:
        return _RouterGone(f"{code}: {message}", is_typed=True)
    return _Failed(Failure(code, message, is_before_answer=status is not None))


def _json(text: str | bytes) -> dict[str, Any]:
    """Raises: _Failed."""
    try:
        value: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise _Failed(Failure("no JSON", repr(text[:200]))) from error
    return value
