"""From a request to its answer as text: what both public APIs stream, and the seam to the pipeline.

pipeline.serve → token ids → Detokenizer → StopStrings → AnswerDelta
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from common.errors import ServingError
from common.sampling import FinishReason
from router.detokenizer import Detokenizer
from router.request import Request, TokenDelta
from router.stop import StopStrings
from router.tenant import Tenant
from router.tokenizer import Tokenizer


class Pipeline(Protocol):
    """What carries out a request. router/pipeline.py is the real one."""

    def serve(self, request: Request) -> AsyncGenerator[TokenDelta, None]:
        """The sampled tokens; the last one, and only it, has a finish reason. The request has reached its end state
        once the generator is exhausted, closed or has raised. Closing it early cancels the request everywhere.

        Raises: a ServingError.
        """

    def require_room(self, tenant: Tenant) -> None:
        """Raises: QueueFull when whatever this tenant sends now would be refused."""


class WorkerLimits(Protocol):
    """What the workers told the router about the model when they registered. router/registry.py is the real one."""

    def max_model_len(self) -> int | None:
        """Tokens, prompt and answer together; None before the first worker."""

    def vocab_size(self) -> int | None:
        """Token ids below this are valid; None before the first worker."""

    def not_ready_reason(self) -> str | None:
        """Why no request can be served now; None when one can."""

    async def until_ready(self) -> None:
        """Wait a moment for workers that are about to come (back); returns at once as a rule."""


@dataclass(frozen=True)
class ServedModel:
    name: str  # what clients call it
    workers: WorkerLimits


@dataclass(frozen=True)
class Usage:
    """Every token counted once. A special token that ends the answer is a completion token; its text is not shown."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class AnswerDelta:
    """What one sampled token adds to the answer. The last delta, and only it, has finish_reason and usage.

    text is empty while a character is incomplete or may belong to a stop string.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    usage: Usage | None = None


async def answer(
    pipeline: Pipeline, tokenizer: Tokenizer, request: Request, stop: Sequence[str]
) -> AsyncGenerator[AnswerDelta, None]:
    """One delta per token. Closing it closes the pipeline's generator, which cancels the request.

    A token that ends the answer by itself (end of sequence, stop token) adds no text. The last delta is held until the
    pipeline is done with the request, so that its timeline is complete.
    Raises: what the pipeline raises; ServingError when it ends without saying why.
    """
    detokenizer = Detokenizer(tokenizer)
    stops = StopStrings(stop)
    num_tokens = 0
    last: AnswerDelta | None = None
    async with aclosing(pipeline.serve(request)) as tokens:
        async for token in tokens:
            assert last is None, "the pipeline sent a token after the last one"
            num_tokens += 1
            text = _text_of(token, detokenizer, stops)
            if stops.is_complete:
                request.ended_by_stop_string = token.finish_reason is None
                last = AnswerDelta(text, (token.token_id,), FinishReason.STOP)
                break
            if token.finish_reason is not None:
                last = AnswerDelta(text, (token.token_id,), token.finish_reason)
            else:
                yield AnswerDelta(text, (token.token_id,))
    if last is None:
        raise ServingError(f"the answer broke off after {num_tokens} tokens without a finish reason")
    usage = Usage(len(request.prompt_token_ids), num_tokens, request.cached_tokens)
    yield AnswerDelta(last.text, last.token_ids, last.finish_reason, usage)


def _text_of(token: TokenDelta, detokenizer: Detokenizer, stops: StopStrings) -> str:
    """What may be shown now. With the last token, everything that is left."""
    text = "" if token.finish_reason is FinishReason.STOP else detokenizer.push(token.token_id)
    if token.finish_reason is not None:
        text += detokenizer.flush()
    shown = stops.push(text)
    if token.finish_reason is not None and not stops.is_complete:
        shown += stops.flush()
    return shown
