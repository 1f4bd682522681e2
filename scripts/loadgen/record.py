"""What one request looked like from outside."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from loadgen.workload import PlannedRequest


@dataclass(frozen=True)
class ServerTimings:
    """Where pdserve says that a request spent its time. Other servers do not tell."""

    stages: dict[str, float]  # seconds by name, in the order that they were entered; see common/lifecycle.py
    prefill_worker: str  # empty: the decode worker computed the prompt itself
    decode_worker: str
    attempts: int


@dataclass(frozen=True)
class Delta:
    """One event of an answer's stream."""

    num_tokens: int = 0  # 0: the event carries no token, only an end or a count
    is_end: bool = False  # carries the finish reason
    input_tokens: int | None = None  # the server's own counts, once it tells them
    output_tokens: int | None = None
    cached_tokens: int | None = None  # of the input: found in a prefix cache
    timings: ServerTimings | None = None


class RequestFailed(Exception):
    """A request that got no whole answer. `kind` is one of a few short names, such as `HTTP 429 queue_full`."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind = kind
        self.detail = detail


class Unreachable(Exception):
    """Nothing serves at the target; the message is one line for the person who typed the address."""


class Target(Protocol):
    """A server under load, over one protocol."""

    label: str

    async def connect(self) -> None:
        """Check that a server answers, and learn its model where none was named. Raises: Unreachable."""

    def stream(self, request: PlannedRequest) -> AsyncGenerator[Delta, None]:
        """Send one request and follow its answer. Raises: RequestFailed."""

    async def close(self) -> None: ...


@dataclass
class RequestRecord:
    """One request's timestamps (of one monotonic clock, in seconds) and counts.

    Latencies count from `scheduled_s`, when the request should have been sent: a generator or a server that
    falls behind cannot hide it (coordinated omission).
    """

    scheduled_s: float
    sent_s: float
    planned_input_tokens: int
    planned_output_tokens: int
    token_event_s: list[float] = field(default_factory=list)  # when each event that carried tokens came
    end_s: float | None = None  # when the finish reason, the last token or the failure came
    event_tokens: int = 0
    usage_input_tokens: int | None = None
    usage_output_tokens: int | None = None
    cached_tokens: int = 0  # of the input, as far as the server tells
    failure: RequestFailed | None = None
    timings: ServerTimings | None = None

    def note(self, delta: Delta, now_s: float) -> None:
        if delta.num_tokens:
            self.token_event_s.append(now_s)
            self.event_tokens += delta.num_tokens
        if delta.num_tokens or delta.is_end:
            self.end_s = now_s
        if delta.output_tokens is not None:
            self.usage_input_tokens, self.usage_output_tokens = delta.input_tokens, delta.output_tokens
            self.cached_tokens = delta.cached_tokens or 0
        if delta.timings is not None:
            self.timings = delta.timings

    @property
    def is_completed(self) -> bool:
        return self.failure is None and self.end_s is not None

    @property
    def input_tokens(self) -> int:
        return self.planned_input_tokens if self.usage_input_tokens is None else self.usage_input_tokens

    @property
    def output_tokens(self) -> int:
        return self.event_tokens if self.usage_output_tokens is None else self.usage_output_tokens

    @property
    def ttft_s(self) -> float | None:
        return self.token_event_s[0] - self.scheduled_s if self.token_event_s else None

    @property
    def end_to_end_s(self) -> float | None:
        return None if self.end_s is None else self.end_s - self.scheduled_s

    @property
    def tpot_s(self) -> float | None:
        """(end-to-end − TTFT) / (output tokens − 1); an answer of one token has none."""
        if self.end_to_end_s is None or self.ttft_s is None or self.output_tokens < 2:
            return None
        return (self.end_to_end_s - self.ttft_s) / (self.output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Gaps between consecutive token events. An event of several tokens ends one gap, not several."""
        return [later - earlier for earlier, later in pairwise(self.token_event_s)]
