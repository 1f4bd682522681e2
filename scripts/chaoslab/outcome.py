"""What became of one request, and whether what came of its answer is right."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from chaoslab.asks import Answer
from common.errors import Overloaded, WorkerUnavailable, error_types

# A request that is turned away hears so before it costs anybody anything; what fails later had been admitted.
AT_ONCE_S = 1.0
REFUSALS = (Overloaded, WorkerUnavailable)


class Ending(StrEnum):
    COMPLETED = "completed"
    LEFT = "left"  # the client went, as it was meant to
    REFUSED = "refused"  # by a typed error, at once
    FAILED = "failed"  # by a typed error, after it was admitted
    UNTYPED = "untyped"  # by anything else: a broken stream, an error without a code, no server
    HUNG = "hung"  # no end by its deadline and a margin


@dataclass(frozen=True)
class Break:
    """A router took an answer with it; the client sent its request again."""

    at_s: float
    why: str
    is_typed: bool  # the router said so


@dataclass(frozen=True)
class Failure:
    """How the server, or the network, ended a request."""

    code: str  # of the error's body, else a few words
    message: str = ""
    is_before_answer: bool = False  # an HTTP status instead of a stream

    @property
    def is_typed(self) -> bool:
        return self.code in _CODES

    def ending(self, after_s: float) -> Ending:
        """after_s: since the request was sent, the last time if it was sent again."""
        if not self.is_typed:
            return Ending.UNTYPED
        is_refusal = issubclass(_CODES[self.code], REFUSALS)
        return Ending.REFUSED if is_refusal and self.is_before_answer and after_s < AT_ONCE_S else Ending.FAILED


_CODES = {kind.code: kind for kind in error_types().values() if kind.code is not None}


@dataclass
class Outcome:
    """One request of one client, filled in while it goes on. Times are of one monotonic clock."""

    name: str  # X-Request-Id, so that the routers' logs tell its story
    sent_s: float
    ending: Ending = Ending.HUNG  # until it has another
    first_text_s: float | None = None
    end_s: float | None = None
    texts: list[str] = field(default_factory=list)
    answer: Answer | None = None  # once it is whole
    failure: Failure | None = None
    breaks: list[Break] = field(default_factory=list)

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_text_s is None else self.first_text_s - self.sent_s

    def mistake(self, expected: Answer) -> str | None:
        """How it differs from the fault-free answer; of one that is not whole, what came must be its beginning."""
        if self.answer is not None:
            return None if self.answer == expected else f"{self.name}: expected {expected}, got {self.answer}"
        text = "".join(self.texts)
        return None if expected.text.startswith(text) else f"{self.name}: expected {expected.text!r}, got {text!r}"
