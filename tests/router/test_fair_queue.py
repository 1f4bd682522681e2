"""Fair shares as properties: whatever comes and goes, nobody starves, order is kept, and tokens are shared evenly."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.fair_queue import QUANTUM_TOKENS, FairQueue
from router.priority_lanes import WEIGHTS, Priority

MAX_COST = 5000
TENANTS = ("a", "b", "c")


@dataclass(eq=False, frozen=True)
class Entry:
    tenant: str
    cost: int
    priority: Priority = Priority.NORMAL
    number: int = 0


costs = st.integers(1, MAX_COST)
entries = st.builds(Entry, st.sampled_from(TENANTS), costs, st.sampled_from(Priority))
# an entry arrives, the next one is served, or the nth of those waiting leaves
events = st.lists(st.one_of(entries, st.none(), st.integers(0, 20)), max_size=150)


def filled(*arriving: Entry) -> FairQueue[Entry]:
    queue: FairQueue[Entry] = FairQueue()
    for entry in arriving:
        queue.push(entry)
    return queue


def drained(queue: FairQueue[Entry]) -> list[Entry]:
    return [queue.pop() for _ in range(len(queue))]


@given(events)
def test_what_came_in_comes_out_once_and_in_order_within_a_tenant_and_priority(
    events: list[Entry | int | None],
) -> None:
    queue, waiting = filled(), list[Entry]()
    for event in events:
        if isinstance(event, Entry):
            queue.push(event)
            waiting.append(event)
        elif isinstance(event, int) and waiting:
            left = waiting.pop(event % len(waiting))
            queue.remove(left)
        elif event is None and waiting:
            head = queue.peek()
            served = queue.pop()
            assert served is head
            alike = [each for each in waiting if (each.tenant, each.priority) == (served.tenant, served.priority)]
            assert served is alike[0]
            waiting.remove(served)
        assert len(queue) == len(waiting)
        assert queue.num_tokens == sum(each.cost for each in waiting)
        for tenant in TENANTS:
            assert queue.tokens_of(tenant) == sum(each.cost for each in waiting if each.tenant == tenant)
        assert (queue.peek() is None) == (not waiting)
    assert Counter(drained(queue)) == Counter(waiting)


@given(st.lists(st.lists(costs, min_size=30, max_size=30), min_size=2, max_size=5))
def test_tenants_that_wait_are_given_the_same_number_of_tokens(costs_by_tenant: list[list[int]]) -> None:
    queue = filled(*(Entry(str(i), cost) for i, costs in enumerate(costs_by_tenant) for cost in costs))
    given_tokens = Counter({str(i): 0 for i in range(len(costs_by_tenant))})
    while all(queue.tokens_of(tenant) for tenant in given_tokens):  # as long as all of them wait
        entry = queue.pop()
        given_tokens[entry.tenant] += entry.cost
        assert max(given_tokens.values()) - min(given_tokens.values()) <= QUANTUM_TOKENS + 2 * MAX_COST


@settings(max_examples=30)
@given(st.integers(1, MAX_COST), st.sampled_from(Priority), st.lists(costs, min_size=5, max_size=5))
def test_nobody_starves_behind_a_burst(cost: int, priority: Priority, burst: list[int]) -> None:
    """However long the other's queue is, one request comes up within the rounds that its length takes."""
    queue = filled(*(Entry("burst", burst[i % 5], Priority.HIGH) for i in range(1000)))
    queue.pop()
    lonely = Entry("lonely", cost, priority)
    queue.push(lonely)
    tokens_before = 0
    while (entry := queue.pop()) is not lonely:
        tokens_before += entry.cost
    assert tokens_before <= cost + 2 * (QUANTUM_TOKENS + MAX_COST)


def test_a_tenant_with_nothing_waiting_saves_nothing_up() -> None:
    queue = filled(Entry("a", 1))
    queue.pop()
    for i in range(20):
        queue.push(Entry("a", QUANTUM_TOKENS, number=i))
        queue.push(Entry("b", QUANTUM_TOKENS, number=i))
    assert Counter(entry.tenant for entry in drained(queue)[:10]) == {"a": 5, "b": 5}


def test_priorities_share_a_tenants_tokens_by_weight() -> None:
    queue = filled(*(Entry("a", 10, priority) for priority in reversed(Priority) for _ in range(200)))
    served = [queue.pop() for _ in range(210)]
    counts = Counter(entry.priority for entry in served)
    assert counts == {priority: weight * 10 for priority, weight in WEIGHTS.items()}
    assert [entry.priority for entry in served[:3]] == [Priority.HIGH, Priority.NORMAL, Priority.LOW]


def test_a_high_priority_comes_first_when_it_arrives_behind_lower_ones() -> None:
    queue = filled(*(Entry("a", 100, Priority.LOW) for _ in range(10)))
    queue.pop()
    urgent = Entry("a", 4000, Priority.HIGH)
    queue.push(urgent)
    assert queue.pop() is urgent


def test_a_priority_buys_nothing_from_other_tenants() -> None:
    queue = filled(
        *(Entry("a", 1024, Priority.HIGH) for _ in range(10)), *(Entry("b", 1024, Priority.LOW) for _ in range(10))
    )
    assert Counter(entry.tenant for entry in drained(queue)[:10]) == {"a": 5, "b": 5}


def test_an_empty_queue_has_nobody() -> None:
    queue = filled()
    assert queue.peek() is None
    with pytest.raises(IndexError):
        queue.pop()
