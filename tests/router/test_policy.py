from __future__ import annotations

from collections import Counter

import pytest

from router.policy import RoundRobin, WorkerSnapshot, least_loaded, make_policy


def worker(name: str, num_assigned: int = 0, tokens: int = 0) -> WorkerSnapshot:
    return WorkerSnapshot(name, num_assigned, tokens)


@pytest.mark.parametrize(
    ("workers", "chosen"),
    [
        ([worker("a", 1, 100), worker("b", 0, 0)], "b"),
        ([worker("a", 1, 100), worker("b", 3, 90)], "b"),  # tokens before requests
        ([worker("a", 2, 100), worker("b", 1, 100)], "b"),
        ([worker("a", 9, 9)], "a"),
    ],
)
def test_least_loaded_takes_the_fewest_tokens_then_the_fewest_requests(
    workers: list[WorkerSnapshot], chosen: str
) -> None:
    assert least_loaded(workers).worker_id == chosen
    assert least_loaded(workers[::-1]).worker_id == chosen


def test_least_loaded_breaks_ties_at_random() -> None:
    idle = [worker(name) for name in "abcd"]
    chosen = Counter(least_loaded(idle).worker_id for _ in range(400))
    assert set(chosen) == set("abcd")
    assert max(chosen.values()) < 200


def test_round_robin_takes_each_in_turn_whatever_the_order_and_however_the_pool_changes() -> None:
    turn = RoundRobin()
    pool = [worker(name) for name in "cab"]
    assert [turn(pool).worker_id for _ in range(4)] == ["a", "b", "c", "a"]
    assert turn([*pool, worker("aa")]).worker_id == "aa"
    assert turn([worker("b"), worker("c")]).worker_id == "b"
    assert turn([worker("a")]).worker_id == "a"


def test_each_pool_has_a_turn_of_its_own() -> None:
    first, second = make_policy("round_robin"), make_policy("round_robin")
    pool = [worker("a"), worker("b")]
    assert [first(pool).worker_id, second(pool).worker_id] == ["a", "a"]
    assert make_policy("least_loaded") is least_loaded
