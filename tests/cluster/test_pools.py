"""From the workers that are there to those that are wished: whom to add, whom to let go, what to refuse."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from cluster.host import Ending
from cluster.plan import Overrides, make_plan
from cluster.pools import Pools
from cluster.supervisor import Backoff, MemberEvent, Supervisor
from common.config import PoolSection, Role, ServeConfig
from common.errors import InvalidRequest, WorkerUnavailable
from common.pb import serving_pb2 as pb
from tests.cluster.obedient_host import FakeClock, ObedientHost

CRASH = Ending("exit code 1", "boom")


@dataclass
class Scene:
    host: ObedientHost
    time: FakeClock
    supervisor: Supervisor
    pools: Pools
    events: list[MemberEvent] = field(default_factory=list)

    def pool(self, role: Role) -> pb.PoolStatus:
        return self.pools.statuses()[list(Role).index(role)]

    def names(self, role: Role) -> list[str]:
        return [member.worker_id for member in self.pool(role).members]

    def leaving(self, role: Role) -> list[str]:
        return [member.worker_id for member in self.pool(role).members if member.is_leaving]

    async def become(self, role: Role, names: list[str]) -> None:
        async with asyncio.timeout(5):
            while self.names(role) != names:
                await asyncio.sleep(0)


@asynccontextmanager
async def running(prefill: int = 1, decode: int = 1, config: ServeConfig | None = None) -> AsyncIterator[Scene]:
    plan = make_plan(config or ServeConfig(), Overrides({Role.PREFILL: prefill, Role.DECODE: decode}), num_cores=8)
    host, time = ObedientHost(), FakeClock()

    def on_event(event: MemberEvent) -> None:
        scene.events.append(event)
        scene.pools.noted(event)

    supervisor = Supervisor(host, on_event, Backoff(max_early_deaths=2), time.clock())
    scene = Scene(host, time, supervisor, Pools(plan, supervisor))
    task = asyncio.create_task(supervisor.run(plan.specs))
    for spec in plan.specs:
        await host.life(spec.name, 1)
    yield scene
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_larger_wish_adds_workers_under_new_names_and_a_smaller_one_lets_the_newest_go() -> None:
    async with running() as scene:
        scene.pools.scale(Role.PREFILL, 3)
        assert scene.names(Role.PREFILL) == ["prefill-0", "prefill-1", "prefill-2"]
        newest = await scene.host.life("prefill-2", 1)
        scene.pools.scale(Role.PREFILL, 2)
        await scene.become(Role.PREFILL, ["prefill-0", "prefill-1"])
        assert newest.is_stopped
        assert scene.names(Role.DECODE) == ["decode-0"]


async def test_a_wish_beyond_what_the_machine_could_bear_is_refused_and_changes_nothing() -> None:
    async with running() as scene:
        with pytest.raises(InvalidRequest, match="too many for a machine with 8 cores: at most 32"):
            scene.pools.scale(Role.PREFILL, 999_999)
        assert scene.names(Role.PREFILL) == ["prefill-0"]
        scene.pools.scale(Role.PREFILL, 2)
        assert scene.names(Role.PREFILL) == ["prefill-0", "prefill-1"]


async def test_the_same_wish_again_changes_nothing() -> None:
    async with running() as scene:
        for _ in range(2):
            scene.pools.scale(Role.PREFILL, 2)
        assert scene.names(Role.PREFILL) == ["prefill-0", "prefill-1"]
        for _ in range(2):
            scene.pools.scale(Role.PREFILL, 1)
        assert scene.pool(Role.PREFILL).wished == 1
        await scene.become(Role.PREFILL, ["prefill-0"])


async def test_the_name_of_one_who_is_still_leaving_is_given_to_nobody() -> None:
    async with running(decode=2) as scene:
        leaving = await scene.host.life("decode-1", 1)
        leaving.may_stop = asyncio.Event()
        scene.pools.scale(Role.DECODE, 1)
        await asyncio.wait_for(leaving.stopping.wait(), 5)
        scene.pools.scale(Role.DECODE, 2)
        assert (scene.names(Role.DECODE), scene.leaving(Role.DECODE)) == (
            ["decode-0", "decode-1", "decode-2"],
            ["decode-1"],
        )
        assert scene.pool(Role.DECODE).wished == 2
        leaving.may_stop.set()
        await scene.become(Role.DECODE, ["decode-0", "decode-2"])
        scene.pools.scale(Role.DECODE, 3)
        assert scene.names(Role.DECODE) == ["decode-0", "decode-2", "decode-1"]


async def test_one_that_does_not_run_is_let_go_before_one_that_serves() -> None:
    async with running(decode=2) as scene:
        scene.time.may_wake = asyncio.Event()
        (await scene.host.life("decode-0", 1)).end.set_result(CRASH)
        async with asyncio.timeout(5):
            while not scene.pool(Role.DECODE).members[0].obstacle:
                await asyncio.sleep(0)
        scene.pools.scale(Role.DECODE, 1)
        await scene.become(Role.DECODE, ["decode-1"])


async def test_a_worker_that_was_drained_by_hand_is_no_longer_wished() -> None:
    async with running(decode=2) as scene:
        (await scene.host.life("decode-1", 1)).end.set_result(Ending("exit code 0", has_left=True))
        await scene.become(Role.DECODE, ["decode-0"])
        assert scene.pool(Role.DECODE).wished == 1


async def test_one_that_cannot_be_started_is_no_longer_wished_and_the_reason_stays_until_the_next_wish() -> None:
    async with running() as scene:
        scene.pools.scale(Role.DECODE, 2)
        for number in (1, 2):
            (await scene.host.life("decode-1", number)).end.set_result(CRASH)
        await scene.become(Role.DECODE, ["decode-0"])
        assert scene.pool(Role.DECODE).wished == 1
        assert scene.pool(Role.DECODE).trouble == "decode-1 died 2 times in a row (exit code 1): boom"
        scene.pools.scale(Role.DECODE, 2)
        assert scene.pool(Role.DECODE).trouble == ""


async def test_pools_that_could_serve_nothing_are_refused_and_nobody_is_let_go() -> None:
    async with running() as scene:
        for role in (Role.PREFILL, Role.DECODE):
            with pytest.raises(InvalidRequest, match="cannot serve: start at least one of each"):
                scene.pools.scale(role, 0)
        assert (scene.leaving(Role.PREFILL), scene.leaving(Role.DECODE)) == ([], [])


async def test_a_pool_may_become_empty_once_another_can_serve() -> None:
    async with running() as scene:
        scene.pools.scale(Role.COLOCATED, 1)
        scene.pools.scale(Role.PREFILL, 0)
        scene.pools.scale(Role.DECODE, 0)
        await scene.become(Role.PREFILL, [])
        await scene.become(Role.DECODE, [])
        assert scene.names(Role.COLOCATED) == ["colocated-0"]
        with pytest.raises(InvalidRequest, match="cannot serve"):
            scene.pools.scale(Role.COLOCATED, 0)


async def test_an_added_worker_gets_a_fair_share_of_the_cores_unless_a_number_was_named() -> None:
    async with running(config=ServeConfig(decode=PoolSection(num_threads=3))) as scene:
        scene.pools.scale(Role.PREFILL, 3)  # four workers on eight cores
        scene.pools.scale(Role.DECODE, 2)
        threads = {state.spec.name: state.spec.num_threads for state in scene.supervisor.members}
        assert (threads["prefill-1"], threads["prefill-2"], threads["decode-1"]) == (2, 2, None)


async def test_nothing_is_added_to_a_deployment_that_stops() -> None:
    async with running() as scene:
        pass
    with pytest.raises(WorkerUnavailable, match="is stopping"):
        scene.pools.scale(Role.PREFILL, 2)
