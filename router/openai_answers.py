"""OpenAI's response bodies: whole answers, stream chunks, errors. Plain dicts, because a chunk is built per token."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from common.errors import ServingError
from common.sampling import FinishReason
from router.answer import AnswerDelta, ServedModel, Usage
from router.openai_schema import StreamOptions
from router.request import Request

JsonObject = dict[str, Any]


def error_body(error: ServingError) -> JsonObject:
    return {
        "error": {"message": error.message, "type": error.openai_type, "param": error.param, "code": error.code},
    }


def model_card(model: ServedModel, created: int) -> JsonObject:
    return {
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": "pdserve",
        "max_model_len": model.workers.max_model_len(),
    }


class AnswerShape(Protocol):
    """How one kind of answer is written."""

    def whole(self, text: str, finish_reason: FinishReason | None, usage: Usage | None) -> JsonObject: ...

    def opening(self) -> list[JsonObject]:
        """Chunks that come before the first text."""

    def chunk(self, text: str, finish_reason: FinishReason | None) -> JsonObject: ...

    def closing_chunk(self, accounts: JsonObject) -> JsonObject:
        """The last chunk of a stream that was asked for its usage or its timings: it has no choices."""


@dataclass(frozen=True)
class AnswerHead:
    """What every part of one answer repeats."""

    request_id: str
    model: str
    includes_usage: bool = False  # in a stream
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(frozen=True)
class ChatShape:
    head: AnswerHead

    def whole(self, text: str, finish_reason: FinishReason | None, usage: Usage | None) -> JsonObject:
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}
        return self._frame("chat.completion") | {"choices": [choice], "usage": usage_body(usage)}

    def opening(self) -> list[JsonObject]:
        return [self._chunk({"role": "assistant", "content": ""}, None)]

    def chunk(self, text: str, finish_reason: FinishReason | None) -> JsonObject:
        return self._chunk({"content": text} if text else {}, finish_reason)

    def closing_chunk(self, accounts: JsonObject) -> JsonObject:
        return self._frame("chat.completion.chunk") | {"choices": []} | accounts

    def _chunk(self, delta: JsonObject, finish_reason: FinishReason | None) -> JsonObject:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return self._frame("chat.completion.chunk") | {"choices": [choice]} | _no_usage_yet(self.head)

    def _frame(self, kind: str) -> JsonObject:
        head = self.head
        return {"id": f"chatcmpl-{head.request_id}", "object": kind, "created": head.created, "model": head.model}


@dataclass(frozen=True)
class CompletionShape:
    head: AnswerHead

    def whole(self, text: str, finish_reason: FinishReason | None, usage: Usage | None) -> JsonObject:
        return self._frame(_text_choice(text, finish_reason)) | {"usage": usage_body(usage)}

    def opening(self) -> list[JsonObject]:
        return []

    def chunk(self, text: str, finish_reason: FinishReason | None) -> JsonObject:
        return self._frame(_text_choice(text, finish_reason)) | _no_usage_yet(self.head)

    def closing_chunk(self, accounts: JsonObject) -> JsonObject:
        return self._frame() | accounts

    def _frame(self, *choices: JsonObject) -> JsonObject:
        return {
            "id": f"cmpl-{self.head.request_id}",
            "object": "text_completion",
            "created": self.head.created,
            "model": self.head.model,
            "choices": list(choices),
        }


def accounts(options: StreamOptions, request: Request, last: AnswerDelta) -> JsonObject:
    """What a stream was asked to tell at its end."""
    usage = {"usage": usage_body(last.usage)} if options.include_usage else {}
    return usage | ({"timings": timings_body(request)} if options.include_timings else {})


def usage_body(usage: Usage | None) -> JsonObject | None:
    if usage is None:
        return None
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def timings_body(request: Request) -> JsonObject:
    """Of a request that has ended: seconds by stage, which add up to its end-to-end time, and who served it."""
    timeline = request.timeline
    return {
        "stages": {str(stage): seconds for stage, seconds in timeline.stages.items()},
        "ttft_s": timeline.ttft_s,
        "tpot_s": timeline.tpot_s,
        "end_to_end_s": timeline.end_to_end_s,
        "prefill_worker": request.prefill_worker,
        "decode_worker": request.decode_worker,
        "attempts": request.attempts,
        "placement": request.placement,  # who computed the prompt, and why
    }


def _text_choice(text: str, finish_reason: FinishReason | None) -> JsonObject:
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}


def _no_usage_yet(head: AnswerHead) -> JsonObject:
    """A stream that was asked for usage says null in every chunk but the last."""
    return {"usage": None} if head.includes_usage else {}
