"""A client's wish as the router sees it once it is validated and tokenized."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cached_property

from common.lifecycle import Timeline
from common.sampling import FinishReason, SamplingParams
from common.tracing import NO_CARRIER, Carrier
from router.priority_lanes import Priority
from router.prompt_hashes import PromptHashes
from router.tenant import ANONYMOUS, Tenant


@dataclass(frozen=True)
class TokenDelta:
    """One sampled token; the last one of an answer says why it ended."""

    token_id: int
    finish_reason: FinishReason | None = None


@dataclass
class Request:
    """One wish with one life. pipeline.serve alone writes `timeline` and what follows, except where noted."""

    request_id: str  # for people and logs; never an identity between workers
    prompt_token_ids: list[int]
    sampling: SamplingParams  # with max_tokens and seed filled in
    deadline_s: float  # time.monotonic() by which the answer must be finished
    tenant: Tenant = ANONYMOUS
    priority: Priority = Priority.NORMAL
    timeline: Timeline = field(default_factory=lambda: Timeline(time.monotonic))
    caller: Carrier = NO_CARRIER  # the client's trace; once it is served, our span in it
    prefill_worker: str = ""  # empty: the decode worker computed the prompt
    decode_worker: str = ""
    placement: str = ""  # who computed the prompt and why, such as "decode: short_prompt"
    attempts: int = 0
    migrations: int = 0  # those of them that began in the middle of the answer
    cached_tokens: int = 0  # prefix-cache hits
    ended_by_stop_string: bool = False  # written by answer(): closing serve() then finishes, it does not cancel

    @cached_property
    def prompt_hashes(self) -> PromptHashes:
        return PromptHashes(self.prompt_token_ids, self.tenant.cache_salt)
