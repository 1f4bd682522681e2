"""Limits per key: by a clock of our own, to the last token."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import RateLimited
from common.sampling import SamplingParams
from router.rate_limit import RateLimiter, TokenBucket
from router.request import Request
from router.tenant import ANONYMOUS, RateLimits, Tenant


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def limiter(clock: Clock) -> RateLimiter:
    return RateLimiter(clock)


def request(tenant: Tenant, num_prompt: int = 10, max_tokens: int = 10) -> Request:
    return Request("r", [1] * num_prompt, SamplingParams(max_tokens), time.monotonic() + 60, tenant)


def finish(request: Request, num_output: int) -> Request:
    request.decode_worker = "decode-0"
    for _ in range(num_output):
        request.timeline.count_token()
    return request


def wait_s(limiter: RateLimiter, wanted: Request) -> float:
    with pytest.raises(RateLimited) as refused:
        limiter.reserve(wanted)
    assert refused.value.retry_after_s is not None
    return refused.value.retry_after_s


def test_requests_per_minute_may_come_at_once_and_then_evenly(limiter: RateLimiter, clock: Clock) -> None:
    tenant = Tenant("alice", RateLimits(requests_per_minute=6))
    for _ in range(6):
        limiter.reserve(request(tenant))
    for _ in range(3):
        assert wait_s(limiter, request(tenant)) == pytest.approx(10)
        clock.now_s += 4
        assert wait_s(limiter, request(tenant)) == pytest.approx(6)
        clock.now_s += 6
        limiter.reserve(request(tenant))


def test_tokens_are_reserved_in_full_and_corrected_by_what_was_used(limiter: RateLimiter) -> None:
    tenant = Tenant("alice", RateLimits(tokens_per_minute=100))
    running = request(tenant, 20, 60)
    reserved = limiter.reserve(running)
    assert limiter.headers(tenant)["x-ratelimit-remaining-tokens"] == "20"
    assert wait_s(limiter, request(tenant, 20, 10)) == pytest.approx(6)
    limiter.settle(finish(running, 5), reserved)
    assert limiter.headers(tenant)["x-ratelimit-remaining-tokens"] == "75"
    limiter.reserve(request(tenant, 20, 10))


def test_a_request_that_no_worker_was_given_costs_no_tokens(limiter: RateLimiter) -> None:
    tenant = Tenant("alice", RateLimits(tokens_per_minute=100))
    refused = request(tenant, 20, 60)
    limiter.settle(refused, limiter.reserve(refused))
    assert limiter.headers(tenant)["x-ratelimit-remaining-tokens"] == "100"


def test_a_refused_request_takes_nothing(limiter: RateLimiter) -> None:
    tenant = Tenant("alice", RateLimits(requests_per_minute=10, tokens_per_minute=100))
    limiter.reserve(request(tenant, 40, 40))
    wait_s(limiter, request(tenant, 40, 40))
    assert limiter.headers(tenant)["x-ratelimit-remaining-requests"] == "9"
    assert limiter.headers(tenant)["x-ratelimit-remaining-tokens"] == "20"


def test_more_than_a_minutes_worth_runs_from_a_full_bucket_and_is_paid_off(limiter: RateLimiter, clock: Clock) -> None:
    tenant = Tenant("alice", RateLimits(tokens_per_minute=60))
    long = request(tenant, 90, 90)
    reserved = limiter.reserve(long)
    assert reserved == 60
    limiter.settle(finish(long, 30), reserved)  # 120 used: 60 are owed
    assert limiter.headers(tenant)["x-ratelimit-remaining-tokens"] == "0"
    assert wait_s(limiter, request(tenant, 5, 5)) == pytest.approx(70)
    with pytest.raises(RateLimited):
        limiter.require_room(tenant)
    clock.now_s += 70
    limiter.reserve(request(tenant, 5, 5))


def test_tenants_do_not_share_a_bucket_and_the_unlimited_have_none(limiter: RateLimiter) -> None:
    alice, bob = (Tenant(name, RateLimits(requests_per_minute=1)) for name in ("alice", "bob"))
    limiter.reserve(request(alice))
    limiter.reserve(request(bob))
    wait_s(limiter, request(alice))
    for _ in range(1000):
        limiter.reserve(request(ANONYMOUS))
    assert limiter.headers(ANONYMOUS) == {}


def test_new_limits_of_a_name_count_at_once_and_what_was_used_stays_used(limiter: RateLimiter) -> None:
    for _ in range(10):
        limiter.reserve(request(Tenant("alice", RateLimits(requests_per_minute=10))))
    more = Tenant("alice", RateLimits(requests_per_minute=12))
    limiter.reserve(request(more))
    limiter.reserve(request(more))
    wait_s(limiter, request(more))
    limiter.reserve(request(Tenant("alice")))  # no limit any more


def test_headers_are_openais(limiter: RateLimiter, clock: Clock) -> None:
    tenant = Tenant("alice", RateLimits(requests_per_minute=600, tokens_per_minute=30))
    running = request(tenant, 10, 20)
    reserved = limiter.reserve(running)
    limiter.settle(finish(running, 140), reserved)
    assert limiter.headers(tenant) == {
        "x-ratelimit-limit-requests": "600",
        "x-ratelimit-remaining-requests": "599",
        "x-ratelimit-reset-requests": "100ms",
        "x-ratelimit-limit-tokens": "30",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "5m0s",
    }
    clock.now_s += 290
    assert limiter.headers(tenant)["x-ratelimit-reset-tokens"] == "10s"


@given(st.integers(1, 1000), st.lists(st.tuples(st.floats(0, 30), st.integers(0, 1500)), max_size=50))
def test_no_more_is_given_than_a_full_bucket_and_what_has_flowed_in(
    per_minute: int, wishes: list[tuple[float, int]]
) -> None:
    clock = Clock()
    bucket, taken = TokenBucket(per_minute, clock), 0
    for pause_s, amount in wishes:
        clock.now_s += pause_s
        if amount <= per_minute and bucket.wait_s(amount) == 0:
            bucket.take(amount)
            taken += amount
        elif amount <= per_minute:
            promised_s = bucket.wait_s(amount)
            clock.now_s += promised_s
            assert bucket.wait_s(amount) < 1e-3
        assert taken <= per_minute * (1 + clock.now_s / 60) + 1e-3
        assert bucket.level <= per_minute
