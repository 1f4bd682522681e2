"""Real workers over links that fail: nothing wrong, nothing left, nobody stuck. faultlab.py runs more of the same."""

from __future__ import annotations

from random import Random

import pytest

from tests.kv_transfer.faultlab import RATES, grant, new_wishes, running_lab
from tests.kv_transfer.faults import HANDSHAKE, POINTS, Fault, FaultPlan
from tests.kv_transfer.lab_journey import Wish
from tests.kv_transfer.lab_workers import Patience

CALM = Patience(connect_s=20.0, commit_s=30.0, stall_s=30.0)
HURRIED = Patience(connect_s=0.5, commit_s=0.3, stall_s=0.3)
TRANSFERS = {"loopback": 160, "grpc": 60, "tcp": 40, "shm": 40, "torch_dist": 30}


@pytest.mark.parametrize("kind", ["loopback", "grpc"])
async def test_without_faults_every_request_is_answered_and_the_counters_of_trouble_stay_at_zero(kind: str) -> None:
    random = Random(4)
    async with running_lab(kind, FaultPlan(random), CALM) as lab:
        await grant(lab, new_wishes(random, 60, leaving=0.0, aborted=0.0), num_in_flight=6)
    tally = lab.tally
    assert tally.faults_found == []
    assert (tally.committed, tally.attempts, tally.retried) == (60, 60, 0)
    assert tally.failed_attempts == {}
    assert tally.destinations.transfers_committed == 60
    assert tally.sources.transfers_failed == tally.destinations.transfers_failed == 0
    assert tally.destinations.pieces_rejected == {}
    assert tally.destinations.stale_pieces == len(tally.destinations.quarantined) == 0
    assert tally.sources.pieces == tally.destinations.pieces > 60
    assert tally.sources.bytes == tally.destinations.bytes


@pytest.mark.parametrize("kind", list(TRANSFERS))
async def test_with_faults_nothing_is_wrong_or_leaked_or_stuck(kind: str) -> None:
    random = Random(5)
    plan = FaultPlan(random, RATES)
    async with running_lab(kind, plan, HURRIED) as lab:
        await grant(lab, new_wishes(random, TRANSFERS[kind]), num_in_flight=24)
    tally = lab.tally
    assert tally.faults_found == [], tally.table()
    assert tally.committed > 0
    assert tally.sources.transfers_committed <= tally.destinations.transfers_committed
    assert sum(plan.happened.values()) > TRANSFERS[kind] // 2


@pytest.mark.parametrize("side", [Fault.KILL_SOURCE, Fault.KILL_DESTINATION, Fault.CUT])
@pytest.mark.parametrize("point", POINTS)
async def test_a_request_outlives_a_death_at_any_point(point: str, side: Fault) -> None:
    plan = FaultPlan(Random(6))
    plan.arm(side, point, num_spared=2 if point == "piece" else 0)
    async with running_lab("loopback", plan, CALM) as lab:
        for _ in range(20):
            await lab.request(Wish(list(range(40, 80))))
            if plan.happened:
                break
        await lab.request(Wish(list(range(90, 130))))
    assert dict(plan.happened) == {(side, point): 1}
    assert lab.tally.deaths == (side is not Fault.CUT)
    assert lab.tally.faults_found == []
    assert lab.tally.committed == lab.tally.requests
    assert lab.tally.retried >= (point in HANDSHAKE)
