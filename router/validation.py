"""From what a client asked for to a Request that the workers can carry out, or one error that names the mistake.

The router validates once; no worker sees a request that has not passed here.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import InvalidRequest, PromptTooLong, UnknownModel, WorkerUnavailable
from common.lifecycle import Timeline
from common.sampling import MAX_SEED, SamplingParams
from common.tracing import NO_CARRIER, Carrier
from router.answer import ServedModel
from router.chat_template import ChatMessage
from router.priority_lanes import Priority
from router.request import Request
from router.tenant import Tenant
from router.tokenizer import Tokenizer

MAX_STOP_STRINGS = 4  # OpenAI's own limit
INLINE_CHARACTERS = 4096  # longer texts are tokenized beside the event loop, which must go on streaming


@dataclass(frozen=True)
class Wish:
    """What a client asked for, whichever API it came by. None: the client left it to us."""

    prompt: str | Sequence[int] | Sequence[ChatMessage]
    model: str | None = None
    max_tokens: int | None = None  # None: as many as fit the model's context
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None  # None: drawn at random
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] = ()
    stop: Sequence[str] = ()
    timeout_s: float | None = None  # never more than the router's own
    priority: Priority = Priority.NORMAL
    caller: Carrier = NO_CARRIER  # of the client's trace


@dataclass(frozen=True)
class Validator:
    """Knows the limits that a wish must respect."""

    tokenizer: Tokenizer
    model: ServedModel
    request_timeout_s: float

    async def request(self, wish: Wish, request_id: str, tenant: Tenant) -> Request:
        """Raises: UnknownModel, InvalidRequest, InvalidSampling, PromptTooLong; WorkerUnavailable before the first
        worker has said how long a prompt may be."""
        timeline = Timeline(time.monotonic)  # the request arrived now; tokenizing it is part of its life
        await self.model.workers.until_ready()
        self._require_served(wish.model)
        _require_stop_strings(wish.stop)
        self._require_vocabulary("stop_token_ids", wish.stop_token_ids)
        token_ids = await self._prompt_token_ids(wish.prompt)
        sampling = SamplingParams(
            max_tokens=self._max_tokens(len(token_ids), wish.max_tokens),
            temperature=1.0 if wish.temperature is None else wish.temperature,
            top_p=1.0 if wish.top_p is None else wish.top_p,
            top_k=min(wish.top_k or 0, self.tokenizer.vocab_size),
            seed=secrets.randbelow(MAX_SEED + 1) if wish.seed is None else wish.seed,
            ignore_eos=wish.ignore_eos,
            stop_token_ids=tuple(wish.stop_token_ids),
        )
        timeout_s = self.request_timeout_s if wish.timeout_s is None else min(wish.timeout_s, self.request_timeout_s)
        deadline_s = timeline.arrival_s + timeout_s
        return Request(request_id, token_ids, sampling, deadline_s, tenant, wish.priority, timeline, wish.caller)

    def _require_served(self, model: str | None) -> None:
        if model is not None and model != self.model.name:
            raise UnknownModel(f"the model {model!r} is not served here; {self.model.name!r} is", param="model")

    def _require_vocabulary(self, param: str, token_ids: Sequence[int]) -> None:
        size = self.model.workers.vocab_size() or self.tokenizer.vocab_size
        if not token_ids or (min(token_ids) >= 0 and max(token_ids) < size):
            return
        for index, token_id in enumerate(token_ids):
            if not 0 <= token_id < size:
                message = f"token id {token_id} at index {index} of {param} is outside the vocabulary of {size} tokens"
                raise InvalidRequest(message, param=param)

    async def _prompt_token_ids(self, prompt: str | Sequence[int] | Sequence[ChatMessage]) -> list[int]:
        if isinstance(prompt, str):
            param, token_ids = "prompt", await self._encode(prompt)
        elif messages := [item for item in prompt if isinstance(item, ChatMessage)]:
            param, token_ids = "messages", await self._encode_chat(messages)
        else:
            param, token_ids = "prompt", [item for item in prompt if isinstance(item, int)]
        self._require_vocabulary(param, token_ids)
        if not token_ids:
            raise InvalidRequest(f"{param} is empty: a model needs at least one token to go on from", param=param)
        return token_ids

    async def _encode(self, text: str) -> list[int]:
        if not text:
            return []  # a beginning-of-text token alone is no prompt
        if len(text) <= INLINE_CHARACTERS:
            return self.tokenizer.encode(text)
        return await asyncio.to_thread(self.tokenizer.encode, text)

    async def _encode_chat(self, messages: list[ChatMessage]) -> list[int]:
        if sum(len(message.content) for message in messages) <= INLINE_CHARACTERS:
            return self.tokenizer.encode_chat(messages)
        return await asyncio.to_thread(self.tokenizer.encode_chat, messages)

    def _max_tokens(self, num_prompt_tokens: int, asked: int | None) -> int:
        context = self.model.workers.max_model_len()
        if context is None:
            raise WorkerUnavailable(self.model.workers.not_ready_reason() or "no worker has registered yet")
        room = context - num_prompt_tokens
        if room < 1:
            raise PromptTooLong(
                f"the prompt has {num_prompt_tokens} tokens; the model's context is {context} tokens, prompt and "
                "answer together, and one must be left for the answer",
                param="prompt",
            )
        if asked is not None and asked > room:
            raise PromptTooLong(
                f"the prompt has {num_prompt_tokens} tokens and max_tokens is {asked}, together "
                f"{num_prompt_tokens + asked}; the model's context is {context} tokens",
                param="max_tokens",
            )
        return room if asked is None else asked


def _require_stop_strings(stop: Sequence[str]) -> None:
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"stop has {len(stop)} strings; at most {MAX_STOP_STRINGS} are allowed", param="stop")
    if "" in stop:
        raise InvalidRequest("stop holds an empty string, which would end every answer at once", param="stop")
