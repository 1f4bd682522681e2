"""What the two public APIs, HTTP and gRPC, stand on: a wish in, an answer out."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from router.answer import AnswerDelta, Pipeline, ServedModel, answer
from router.gate import Gate, open_gate
from router.request import Request
from router.tenant import Tenant
from router.tokenizer import Tokenizer
from router.validation import Validator, Wish

# More than a token takes on the wire, on average over a prompt: an escaped character has 6 bytes, a token id as many.
BYTES_PER_TOKEN = 64
MIN_REQUEST_BYTES = 1024 * 1024
MAX_REQUEST_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class Frontend:
    pipeline: Pipeline
    tokenizer: Tokenizer
    model: ServedModel
    request_timeout_s: float  # from arrival to the last token
    gate: Gate = field(default_factory=open_gate)

    def max_request_bytes(self) -> int:
        """What is longer than any prompt that fits the model is refused unread."""
        context = self.model.workers.max_model_len() or 0
        return min(MAX_REQUEST_BYTES, max(MIN_REQUEST_BYTES, context * BYTES_PER_TOKEN))

    async def accept(self, wish: Wish, request_id: str, tenant: Tenant) -> Request:
        """Validate and tokenize. Nothing is queued or reserved until the answer is iterated.

        Raises: InvalidRequest and its kinds; QueueFull if it is known by then; WorkerUnavailable before any worker has
        registered.
        """
        self.pipeline.require_room(tenant)
        return await Validator(self.tokenizer, self.model, self.request_timeout_s).request(wish, request_id, tenant)

    async def answer(self, request: Request, wish: Wish) -> AsyncGenerator[AnswerDelta, None]:
        """Raises: RateLimited before anything else; what answer() raises."""
        with self.gate.reserved(request):
            async with aclosing(answer(self.pipeline, self.tokenizer, request, wish.stop)) as deltas:
                async for delta in deltas:
                    yield delta
