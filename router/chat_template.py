"""Chat messages to one prompt string, by the Jinja template that came with the model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import InvalidRequest, ModelError


@dataclass(frozen=True)
class ChatMessage:
    role: str
    content: str


class ChatTemplate:
    """A compiled template. Templates are downloaded with models, so they run in Jinja's sandbox.

    special_tokens: what the template may refer to by name, such as bos_token and eos_token.
    Raises: ModelError when the template does not compile.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            self._template = _environment().from_string(source)
        except TemplateError as error:
            raise ModelError(f"the model's chat template does not compile: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """The prompt up to where the assistant's answer begins.

        Raises: InvalidRequest when the template refuses the messages (roles must alternate, for example).
        """
        try:
            return self._template.render(
                messages=[{"role": message.role, "content": message.content} for message in messages],
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except (TemplateError, TypeError, ValueError) as error:
            message = f"the model's chat template refuses these messages: {error}"
            raise InvalidRequest(message, param="messages") from error


def _environment() -> ImmutableSandboxedEnvironment:
    """What chat templates on the hub are written against: transformers' dialect of Jinja."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
