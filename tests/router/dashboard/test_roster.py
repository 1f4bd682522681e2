from __future__ import annotations

from common.pb import serving_pb2 as pb
from router.dashboard.roster import GONE_S, Roster


def worker(name: str, *, is_draining: bool = False) -> pb.WorkerSummary:
    return pb.WorkerSummary(hello=pb.WorkerHello(worker_id=name), load=pb.WorkerLoad(is_draining=is_draining))


def gone(roster: Roster) -> list[tuple[str, bool, float]]:
    return [(each.hello.worker_id, each.has_left, seconds) for each, seconds in roster.gone()]


def test_who_is_no_longer_a_member_is_gone_until_it_returns_or_is_forgotten() -> None:
    now_s = 0.0
    roster = Roster(lambda: now_s)
    roster.note([worker("a"), worker("b"), worker("c", is_draining=True)])
    assert gone(roster) == []
    now_s = 10.0
    roster.note([worker("a")])
    now_s = 12.0
    roster.note([worker("a")])
    assert gone(roster) == [("b", False, 2.0), ("c", True, 2.0)]
    roster.note([worker("a"), worker("b")])
    assert gone(roster) == [("c", True, 2.0)]
    now_s = 10.0 + GONE_S
    roster.note([worker("a"), worker("b")])
    assert gone(roster) == []
