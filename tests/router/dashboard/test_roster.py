from __future__ import annotations

from common.pb import serving_pb2 as pb
from router.dashboard.roster import GONE_S, Roster


def gone(roster: Roster, *members: str) -> list[tuple[str, bool, float]]:
    return [(each.hello.worker_id, each.has_drained, seconds) for each, seconds in roster.gone(members)]


def test_who_has_left_is_gone_until_it_returns_or_is_forgotten() -> None:
    now_s = 10.0
    roster = Roster(lambda: now_s)
    roster.left(pb.WorkerHello(worker_id="c"), has_drained=True)
    roster.left(pb.WorkerHello(worker_id="b"), has_drained=False)
    now_s = 12.0
    assert gone(roster, "a") == [("b", False, 2.0), ("c", True, 2.0)]
    assert gone(roster, "a", "b") == [("c", True, 2.0)]
    assert gone(roster, "a") == [("c", True, 2.0)]  # b was back
    now_s = 10.0 + GONE_S
    assert gone(roster, "a") == []
