"""What the two public APIs, HTTP and gRPC, stand on: a wish in, an answer out."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass

from router.answer import AnswerDelta, Pipeline, ServedModel, answer
from router.request import Request
from router.tokenizer import Tokenizer
from router.validation import Validator, Wish


@dataclass(frozen=True)
class Frontend:
    pipeline: Pipeline
    tokenizer: Tokenizer
    model: ServedModel
    request_timeout_s: float  # from arrival to the last token

    async def accept(self, wish: Wish, request_id: str) -> Request:
        """Validate and tokenize. Nothing is queued until the answer is iterated.

        Raises: InvalidRequest and its kinds; WorkerUnavailable before any worker has registered.
        """
        return await Validator(self.tokenizer, self.model, self.request_timeout_s).request(wish, request_id)

    def answer(self, request: Request, wish: Wish) -> AsyncGenerator[AnswerDelta, None]:
        return answer(self.pipeline, self.tokenizer, request, wish.stop)
