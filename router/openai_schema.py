"""OpenAI's request bodies, as far as they are served here, and what they ask for as a Wish.

Unknown fields are refused: an option that is silently ignored is a wrong answer.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema, model_validator

from common.errors import InvalidRequest
from common.sampling import MAX_SEED
from router.chat_template import ChatMessage
from router.openai_fields import describe_others, require_harmless
from router.validation import MAX_STOP_STRINGS, Wish

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions


def _require_unicode(text: str) -> str:
    """JSON can spell half of a surrogate pair, which is no character."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError("not valid Unicode") from error
    return text


def _documented(kind: str, **limits: float) -> WithJsonSchema:
    """Limits for the OpenAPI document; router/validation.py has them in force, for both APIs."""
    return WithJsonSchema({"type": kind, **limits})


Text = Annotated[str, AfterValidator(_require_unicode)]
Count = Annotated[int, _documented("integer", minimum=1)]


class Body(BaseModel):
    """A JSON object whose extra fields must be harmless or ask for nothing."""

    model_config = ConfigDict(strict=True, extra="allow", json_schema_extra=describe_others)

    @model_validator(mode="after")
    def _refuse_what_is_not_served(self) -> Body:
        for name, value in (self.model_extra or {}).items():
            require_harmless(name, value)
        return self


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # accepted; our chunks carry no padding
    include_timings: bool | None = None  # beyond OpenAI: where the request spent its time, in the last chunk


class GenerationBody(Body):
    """What both kinds of request have in common. null means the default everywhere."""

    model: str | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, _documented("number", minimum=0, maximum=2)] | None = None
    top_p: Annotated[float, _documented("number", exclusiveMinimum=0, maximum=1)] | None = None
    seed: Annotated[int, _documented("integer", minimum=0, maximum=MAX_SEED)] | None = None
    stop: Text | Annotated[list[Text], Field(json_schema_extra={"maxItems": MAX_STOP_STRINGS})] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # beyond OpenAI
    top_k: Annotated[int, _documented("integer", minimum=0)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def _wish(
        self, prompt: str | list[int] | list[ChatMessage], max_tokens: int | None, timeout_s: float | None
    ) -> Wish:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
        return Wish(
            prompt=prompt,
            model=self.model,
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            ignore_eos=bool(self.ignore_eos),
            stop_token_ids=self.stop_token_ids or [],
            stop=[self.stop] if isinstance(self.stop, str) else self.stop or [],
            timeout_s=timeout_s,
        )


class CompletionBody(GenerationBody):
    prompt: Text | list[int] | list[Text] | list[list[int]]

    def wish(self, timeout_s: float | None) -> Wish:
        """Raises: InvalidRequest for several prompts at once."""
        max_tokens = DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        return self._wish(self._one_prompt(), max_tokens, timeout_s)

    def _one_prompt(self) -> str | list[int]:
        match self.prompt:
            case str() as text:
                return text
            case [str() | list() as only]:
                return only
            case [str() | list(), *_]:
                raise InvalidRequest("prompt holds several prompts; send them as several requests", param="prompt")
            case token_ids:
                return [token_id for token_id in token_ids if isinstance(token_id, int)]


class TextPart(Body):
    type: Literal["text"]
    text: Text


class OtherPart(BaseModel):
    """An image, a sound, a file: recognised, so that it can be refused by name."""

    model_config = ConfigDict(extra="allow")

    type: str


class MessageBody(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[Annotated[TextPart | OtherPart, Field(union_mode="left_to_right")]]

    def message(self) -> ChatMessage:
        """Raises: InvalidRequest for content that is not text."""
        # a developer message is what newer OpenAI models call a system message; templates know the older word
        role = "system" if self.role == "developer" else self.role
        return ChatMessage(role, self.content if isinstance(self.content, str) else _text(self.content))


class ChatBody(GenerationBody):
    messages: Annotated[list[MessageBody], Field(json_schema_extra={"minItems": 1})]
    max_completion_tokens: Count | None = None  # the newer name of max_tokens

    def wish(self, timeout_s: float | None) -> Wish:
        """Raises: InvalidRequest for no messages, or content that is not text."""
        if not self.messages:
            raise InvalidRequest("messages is empty", param="messages")
        asked = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self._wish([message.message() for message in self.messages], asked, timeout_s)


def _text(parts: list[TextPart | OtherPart]) -> str:
    for part in parts:
        if isinstance(part, OtherPart):
            message = f"content parts of type {part.type!r} are not supported, only 'text'"
            raise InvalidRequest(message, param="messages")
    return "\n".join(part.text for part in parts if isinstance(part, TextPart))
