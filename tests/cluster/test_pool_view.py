"""What people are told of a pool: who can serve, and what keeps the others."""

from __future__ import annotations

import pytest

from cluster.pool_view import pool_views
from common.config import Role
from common.pb import serving_pb2 as pb


def worker(name: str, role: pb.Role, **summary: object) -> pb.WorkerSummary:
    return pb.WorkerSummary(hello=pb.WorkerHello(worker_id=name, role=role), **summary)


def status(
    member: pb.PoolMember, *workers: pb.WorkerSummary, pairs: tuple[pb.PairSummary, ...] = ()
) -> pb.ClusterStatus:
    first = pb.PoolMember(worker_id="decode-0")
    pool = pb.PoolStatus(role=pb.ROLE_DECODE, wished=2 - member.is_leaving, members=[first, member])
    serving = worker("decode-0", pb.ROLE_DECODE)
    return pb.ClusterStatus(pools=[pool], workers=[serving, *workers], pairs=pairs)


def pair(standing: pb.PairStanding, reason: str = "") -> pb.PairSummary:
    return pb.PairSummary(prefill_worker="prefill-0", decode_worker="decode-1", standing=standing, reason=reason)


MEMBER = pb.PoolMember(worker_id="decode-1")
DECODE_1 = worker("decode-1", pb.ROLE_DECODE)
BUSY = pb.WorkerLoad(num_running=2, num_reserved=1, is_draining=True)


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (status(MEMBER), "decode-1 is loading"),
        (status(pb.PoolMember(worker_id="decode-1", obstacle="waits for a node")), "decode-1 waits for a node"),
        (status(MEMBER, worker("decode-1", pb.ROLE_DECODE, unfit_reason="silent")), "decode-1 gets no work: silent"),
        (status(MEMBER, DECODE_1, pairs=(pair(pb.PAIR_UNCHECKED),)), "decode-1 is being checked"),
        (status(MEMBER, DECODE_1, pairs=(pair(pb.PAIR_REFUSED, "other"),)), "decode-1 is refused: other"),
        (status(MEMBER, worker("decode-1", pb.ROLE_DECODE, load=BUSY)), "decode-1 is draining: 3 under way"),
    ],
)
def test_a_worker_that_does_not_serve_yet_says_why(now: pb.ClusterStatus, words: str) -> None:
    view = pool_views(now)[Role.DECODE]
    assert str(view) == f"decode: 1 of 2 ready; {words}"
    assert not view.is_as_wished


def test_one_that_leaves_counts_until_it_is_gone_and_is_not_among_the_wished() -> None:
    view = pool_views(status(pb.PoolMember(worker_id="decode-1", is_leaving=True)))[Role.DECODE]
    assert str(view) == "decode: 1 of 1 ready; decode-1 is leaving"
    assert not view.is_as_wished


@pytest.mark.parametrize("pairs", [(), (pair(pb.PAIR_REFUSED), pair(pb.PAIR_GOOD))])
def test_a_pool_is_as_wished_once_each_makes_a_good_pair_or_has_nobody_to_pair_with(
    pairs: tuple[pb.PairSummary, ...],
) -> None:
    view = pool_views(status(MEMBER, DECODE_1, pairs=pairs))[Role.DECODE]
    assert view.is_as_wished
    assert view.ready == ("decode-0", "decode-1")


def test_without_a_supervisor_there_are_no_pools() -> None:
    assert pool_views(pb.ClusterStatus(workers=[DECODE_1])) == {}
