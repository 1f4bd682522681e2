"""Requests and tokens per minute for each tenant, as token buckets.

A request reserves its prompt and all the tokens that it may answer with; when it has ended, what it did not use is
given back. Limits are this router's own: several routers allow as many times as much.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from common.errors import RateLimited
from router.request import Request
from router.tenant import RateLimits, Tenant

Clock = Callable[[], float]

ROUNDING = 1e-6  # of a level: what filling in many small steps may lose


class TokenBucket:
    """Holds a minute's worth and fills evenly. It may be overdrawn: what is missing is filled first."""

    def __init__(self, per_minute: int, clock: Clock) -> None:
        self._capacity = per_minute
        self._level = float(per_minute)
        self._clock = clock
        self._filled_s = clock()

    @property
    def level(self) -> float:
        now = self._clock()
        self._level = min(self._capacity, self._level + (now - self._filled_s) * self._capacity / 60)
        self._filled_s = now
        return self._level

    @property
    def capacity(self) -> int:
        return self._capacity

    def resize(self, per_minute: int) -> None:
        """What was used stays used."""
        used = self._capacity - self.level
        self._capacity = per_minute
        self._level = per_minute - used

    def take(self, amount: float) -> None:
        """A negative amount gives back."""
        self._level = min(self._capacity, self.level - amount)

    def wait_s(self, amount: float) -> float:
        """Until that much is there; more than the bucket can hold waits until it is full."""
        missing = min(amount, self._capacity) - self.level
        return missing * 60 / self._capacity if missing > ROUNDING else 0.0


class RateLimiter:
    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._accounts: dict[str, _Account] = {}  # by the tenant's name

    def require_room(self, tenant: Tenant) -> None:
        """Takes nothing: for a look before a request is even read. Raises: RateLimited."""
        self._account(tenant).require(num_tokens=1)

    def reserve(self, request: Request) -> int:
        """The tokens that were reserved, for `settle`. Raises: RateLimited."""
        return self._account(request.tenant).reserve(len(request.prompt_token_ids) + request.sampling.max_tokens)

    def settle(self, request: Request, reserved: int) -> None:
        """It has ended. A request that no worker was given costs no tokens."""
        self._account(request.tenant).settle(reserved, _num_used(request))

    def headers(self, tenant: Tenant) -> dict[str, str]:
        """As OpenAI names and writes them; nothing about what has no limit."""
        return self._account(tenant).headers()

    def _account(self, tenant: Tenant) -> _Account:
        account = self._accounts.get(tenant.name)
        if account is None:
            account = self._accounts[tenant.name] = _Account(tenant.limits, self._clock)
        account.follow(tenant.limits)
        return account


@dataclass(frozen=True)
class _Limit:
    unit: str
    bucket: TokenBucket


class _Account:
    """One tenant's buckets. Those without a limit do not exist."""

    def __init__(self, limits: RateLimits, clock: Clock) -> None:
        self._clock = clock
        self._limits = RateLimits()
        self._requests: TokenBucket | None = None
        self._tokens: TokenBucket | None = None
        self.follow(limits)

    def follow(self, limits: RateLimits) -> None:
        """The file of keys may have changed."""
        if limits != self._limits:
            self._limits = limits
            self._requests = self._resized(self._requests, limits.requests_per_minute)
            self._tokens = self._resized(self._tokens, limits.tokens_per_minute)

    def require(self, num_tokens: int) -> None:
        for amount, limit in self._wanted(num_tokens):
            if (wait_s := limit.bucket.wait_s(amount)) > 0:
                error = RateLimited(f"this key's limit is {limit.bucket.capacity} {limit.unit} per minute; retry later")
                error.retry_after_s = wait_s
                raise error

    def reserve(self, num_tokens: int) -> int:
        """The tokens that were taken: no more than a minute's worth, or a long prompt could never run."""
        self.require(num_tokens)
        if self._requests is not None:
            self._requests.take(1)
        if self._tokens is None:
            return 0
        reserved = min(num_tokens, self._tokens.capacity)
        self._tokens.take(reserved)
        return reserved

    def settle(self, reserved: int, used: int) -> None:
        if self._tokens is not None:
            self._tokens.take(used - reserved)

    def headers(self) -> dict[str, str]:
        headers: dict[str, str] = {}
        for _, limit in self._wanted(0):
            bucket, unit = limit.bucket, limit.unit
            headers[f"x-ratelimit-limit-{unit}"] = str(bucket.capacity)
            headers[f"x-ratelimit-remaining-{unit}"] = str(max(0, math.floor(bucket.level)))
            headers[f"x-ratelimit-reset-{unit}"] = _duration(bucket.wait_s(bucket.capacity))
        return headers

    def _wanted(self, num_tokens: int) -> Iterator[tuple[int, _Limit]]:
        if self._requests is not None:
            yield 1, _Limit("requests", self._requests)
        if self._tokens is not None:
            yield num_tokens, _Limit("tokens", self._tokens)

    def _resized(self, bucket: TokenBucket | None, per_minute: int | None) -> TokenBucket | None:
        if per_minute is None:
            return None
        if bucket is None:
            return TokenBucket(per_minute, self._clock)
        bucket.resize(per_minute)
        return bucket


def _num_used(request: Request) -> int:
    was_placed = request.decode_worker != ""
    return len(request.prompt_token_ids) + request.timeline.num_output_tokens if was_placed else 0


def _duration(seconds: float) -> str:
    """6m0s, 1.5s, 20ms."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    if seconds < 60:
        return f"{seconds:.3g}s"
    return f"{int(seconds) // 60}m{int(seconds) % 60}s"
