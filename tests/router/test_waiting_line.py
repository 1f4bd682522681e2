"""The line's bounds: who is refused, who makes room, and that retries are beyond both."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import QueueFull
from router.priority_lanes import Priority
from router.waiting_line import QueueBounds, WaitingLine


@dataclass(eq=False, frozen=True)
class Entry:
    tenant: str
    cost: int = 10
    priority: Priority = Priority.NORMAL


def line(max_requests: int = 4, max_tokens: int = 1000) -> WaitingLine[Entry]:
    return WaitingLine(QueueBounds(max_requests, max_tokens))


def test_one_tenant_alone_may_fill_the_line_and_is_then_refused() -> None:
    waiting = line()
    for _ in range(4):
        assert waiting.push(Entry("a")) == []
    with pytest.raises(QueueFull, match="4 requests with 40 prompt tokens"):
        waiting.push(Entry("a"))


def test_of_a_full_line_the_heaviest_tenants_newest_request_makes_room() -> None:
    waiting = line()
    burst = [Entry("a"), Entry("a", priority=Priority.LOW), Entry("a"), Entry("a")]
    for entry in burst:
        waiting.push(entry)
    assert waiting.push(Entry("b")) == [burst[1]]  # its lowest priority first
    assert waiting.push(Entry("c")) == [burst[3]]
    assert waiting.push(Entry("d")) == [burst[2]]
    with pytest.raises(QueueFull):  # now nobody has more than the others
        waiting.push(Entry("e"))


def test_tokens_are_bounded_too() -> None:
    waiting = line(max_tokens=100)
    waiting.push(Entry("a", 90))
    with pytest.raises(QueueFull):
        waiting.push(Entry("a", 11))
    assert waiting.push(Entry("a", 10)) == []


def test_a_prompt_longer_than_the_bound_waits_only_in_an_empty_line() -> None:
    waiting = line(max_tokens=100)
    waiting.push(Entry("a", 5))
    with pytest.raises(QueueFull):
        waiting.push(Entry("b", 500))
    waiting.pop()
    assert waiting.push(Entry("b", 500)) == []
    assert len(waiting.push(Entry("c", 20))) == 1  # and makes room for others


def test_retries_come_first_in_their_order_and_count_for_no_bound() -> None:
    waiting, first, second = line(max_requests=1), Entry("a", 5000), Entry("a")
    fresh = Entry("a")
    waiting.push(fresh)
    waiting.push_retry(first)
    waiting.push_retry(second)
    assert [waiting.pop() for _ in range(3)] == [first, second, fresh]
    assert waiting.peek() is None


def test_whoever_leaves_is_gone_and_may_leave_twice() -> None:
    waiting, retry, fresh = line(), Entry("a"), Entry("b")
    waiting.push_retry(retry)
    waiting.push(fresh)
    for _ in range(2):
        waiting.discard(retry)
        waiting.discard(fresh)
    assert len(waiting) == 0


@given(st.lists(st.builds(Entry, st.sampled_from("abc"), st.integers(1, 150)), max_size=60))
def test_the_bounds_hold_and_everybody_is_either_waiting_or_told(arriving: list[Entry]) -> None:
    waiting, told = line(max_requests=5, max_tokens=100), set[Entry]()
    for entry in arriving:
        before = len(waiting)
        try:
            pushed_out = waiting.push(entry)
        except QueueFull:
            told.add(entry)
            assert len(waiting) == before  # nobody left for nothing
            continue
        assert all(each.tenant != entry.tenant for each in pushed_out)
        told.update(pushed_out)
        assert len(waiting) <= 5
    left = [waiting.pop() for _ in range(len(waiting))]
    assert {*left, *told} == set(arriving)
    assert sum(entry.cost for entry in left) <= 100 or len(left) == 1


@given(st.lists(st.sampled_from("abc"), max_size=8), st.sampled_from("abc"))
def test_who_is_refused_unread_would_be_refused_with_the_shortest_prompt(tenants: list[str], newcomer: str) -> None:
    waiting = line(max_requests=4)
    for tenant in tenants:
        with suppress(QueueFull):
            waiting.push(Entry(tenant))
    try:
        waiting.require_room(newcomer)
    except QueueFull:
        with pytest.raises(QueueFull):
            waiting.push(Entry(newcomer, cost=1))
    else:
        waiting.push(Entry(newcomer, cost=1))
