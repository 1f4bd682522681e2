"""What a client saw of one request, whichever way it went."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol


class AnswerFailed(Exception):
    """The system answered, but not in the way that was to be measured."""


@dataclass
class Answer:
    """Times are of the machine's one monotonic clock, so that those of two processes compare."""

    request_id: str  # as the workers know it
    start_s: float
    event_s: list[float] = field(default_factory=list)  # when each piece of the answer came
    num_tokens: int = 0

    def note_token(self) -> None:
        """One came, by itself."""
        self.event_s.append(time.monotonic())
        self.num_tokens += 1

    def require_tokens(self, num_asked: int) -> None:
        """Raises: AnswerFailed."""
        if self.num_tokens != num_asked:
            raise AnswerFailed(f"{num_asked} tokens were asked for and {self.num_tokens} came")


@dataclass(frozen=True)
class Question:
    """The same prompt as text and as the tokens that it has."""

    text: str
    token_ids: tuple[int, ...]
    num_tokens: int  # of the answer


class Client(Protocol):
    """One way to ask. http_client.py and grpc_clients.py have them."""

    async def ask(self, question: Question) -> Answer:
        """Raises: AnswerFailed, ConnectionError, ServingError."""

    async def close(self) -> None: ...
