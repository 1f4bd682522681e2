"""When to start again, when to give up, and that nothing is left running, on a host that obeys the test."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

import pytest

from cluster.host import Ending, MemberSpec
from cluster.supervisor import (
    Backoff,
    MemberDied,
    MemberDropped,
    MemberEvent,
    MemberGivenUp,
    MemberLeft,
    MemberStarting,
    Supervisor,
)
from common.config import Role
from common.errors import ConfigError
from tests.cluster.obedient_host import FakeClock, ObedientHost

ROUTER = MemberSpec("router", None)
DECODE = MemberSpec("decode-0", Role.DECODE)
ADDED = MemberSpec("decode-1", Role.DECODE)
CRASH = Ending("exit code 1", "boom")

E = TypeVar("E")


class Scene:
    def __init__(self, backoff: Backoff) -> None:
        self.host = ObedientHost()
        self.time = FakeClock()
        self.events: list[MemberEvent] = []
        self.supervisor = Supervisor(self.host, self.events.append, backoff, self.time.clock())

    async def die(self, number: int, lived_s: float = 0.0, ending: Ending = CRASH) -> None:
        member = await self.host.life("decode-0", number)
        self.time.now_s += lived_s
        member.end.set_result(ending)


@asynccontextmanager
async def supervised(scene: Scene, *specs: MemberSpec) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(scene.supervisor.run(specs))
    yield task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_dead_member_is_started_again_after_ever_longer_waits() -> None:
    scene = Scene(Backoff(first_s=0.5, longest_s=3.0, max_early_deaths=100))
    async with supervised(scene, DECODE):
        for number in range(1, 6):
            await scene.die(number)
        await scene.host.life("decode-0", 6)
    assert scene.time.naps == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert [type(event) for event in scene.events[:3]] == [MemberStarting, MemberDied, MemberStarting]


async def test_a_long_life_forgives_earlier_deaths() -> None:
    scene = Scene(Backoff(first_s=0.5, healthy_s=60.0))
    async with supervised(scene, DECODE):
        await scene.die(1)
        await scene.die(2)
        await scene.die(3, lived_s=61.0)
        await scene.host.life("decode-0", 4)
    assert scene.time.naps == [0.5, 1.0, 0.5]


async def test_a_member_that_never_stays_up_is_given_up_with_its_last_words() -> None:
    scene = Scene(Backoff(max_early_deaths=3))
    async with supervised(scene, DECODE) as task:
        for number in range(1, 4):
            await scene.die(number)
        with pytest.raises(MemberGivenUp, match=r"decode-0 died 3 times in a row \(exit code 1\): boom"):
            await asyncio.wait_for(task, 5)


async def test_a_member_that_was_healthy_once_is_never_given_up() -> None:
    scene = Scene(Backoff(max_early_deaths=2, healthy_s=60.0))
    async with supervised(scene, DECODE) as task:
        await scene.die(1, lived_s=100.0)
        for number in range(2, 8):
            await scene.die(number)
        await scene.host.life("decode-0", 8)
        assert not task.done()


async def test_a_config_error_ends_everything_at_once_with_its_message() -> None:
    scene = Scene(Backoff())
    async with supervised(scene, ROUTER, DECODE) as task:
        router = await scene.host.life("router", 1)
        await scene.die(1, ending=Ending("exit code 2", "noise\ndecode-0: no such file m.gguf", is_config_error=True))
        with pytest.raises(ConfigError, match=r"^decode-0: no such file m.gguf$"):
            await asyncio.wait_for(task, 5)
        assert router.is_stopped
    assert scene.time.naps == []


async def test_one_members_death_leaves_the_others_alone() -> None:
    scene = Scene(Backoff())
    async with supervised(scene, ROUTER, DECODE):
        router = await scene.host.life("router", 1)
        await scene.die(1)
        await scene.host.life("decode-0", 2)
        assert not router.is_stopped
        assert len(scene.host.lives["router"]) == 1


async def test_cancelling_stops_every_member() -> None:
    scene = Scene(Backoff())
    async with supervised(scene, ROUTER, DECODE):
        members = [await scene.host.life(name, 1) for name in ("router", "decode-0")]
    assert all(member.is_stopped for member in members)


async def test_a_host_without_room_is_asked_again() -> None:
    scene = Scene(Backoff(first_s=0.5))
    scene.host.num_refusals = 1
    async with supervised(scene, DECODE):
        await scene.host.life("decode-0", 1)
    assert scene.time.naps == [0.5]
    died = next(event for event in scene.events if isinstance(event, MemberDied))
    assert died.ending.reason == "no room"


async def test_a_worker_that_has_left_is_not_started_again_and_a_router_is() -> None:
    scene = Scene(Backoff())
    async with supervised(scene, ROUTER, DECODE) as task:
        await scene.die(1, ending=Ending("exit code 0", has_left=True))
        (await scene.host.life("router", 1)).end.set_result(Ending("exit code 0", has_left=True))
        await scene.host.life("router", 2)
        assert MemberLeft(DECODE) in scene.events
        assert len(scene.host.lives["decode-0"]) == 1
        assert not task.done()


async def test_routers_are_stopped_before_the_workers_that_their_last_answers_need() -> None:
    scene = Scene(Backoff())
    async with supervised(scene, DECODE, ROUTER) as task:
        router, worker = [await scene.host.life(name, 1) for name in ("router", "decode-0")]
        may_stop = asyncio.Event()
        router.may_stop = may_stop
        task.cancel()
        await asyncio.wait_for(router.stopping.wait(), 5)
        assert not worker.is_stopped
        may_stop.set()
        await asyncio.wait({task}, timeout=5)
    assert worker.is_stopped


async def test_an_added_worker_lives_until_it_is_let_go_and_the_others_do_not_notice() -> None:
    scene = Scene(Backoff())
    async with supervised(scene, ROUTER, DECODE):
        first = await scene.host.life("decode-0", 1)
        scene.supervisor.add(ADDED)
        added = await scene.host.life("decode-1", 1)
        assert [state.spec for state in scene.supervisor.members] == [ROUTER, DECODE, ADDED]
        scene.supervisor.let_go("decode-1")
        await has_left(scene, ADDED)
        assert added.is_stopped
        assert not first.is_stopped
        assert [state.spec for state in scene.supervisor.members] == [ROUTER, DECODE]


async def test_a_worker_that_drains_is_a_member_that_is_leaving_until_it_is_gone() -> None:
    scene = Scene(Backoff())
    async with supervised(scene, DECODE):
        member = await scene.host.life("decode-0", 1)
        member.may_stop = asyncio.Event()
        scene.supervisor.let_go("decode-0")
        await asyncio.wait_for(member.stopping.wait(), 5)
        assert [state.is_leaving for state in scene.supervisor.members] == [True]
        assert MemberLeft(DECODE) not in scene.events
        member.may_stop.set()
        await has_left(scene, DECODE)


async def test_an_added_worker_that_dies_is_started_again_like_any_other() -> None:
    scene = Scene(Backoff())
    async with supervised(scene, ROUTER):
        await scene.host.life("router", 1)
        scene.supervisor.add(DECODE)
        await scene.die(1)
        await scene.host.life("decode-0", 2)


@pytest.mark.parametrize("ending", [CRASH, Ending("exit code 2", "no such file", is_config_error=True)])
async def test_an_added_worker_that_cannot_be_started_is_dropped_and_ends_nothing_else(ending: Ending) -> None:
    scene = Scene(Backoff(max_early_deaths=2))
    async with supervised(scene, ROUTER) as task:
        router = await scene.host.life("router", 1)
        scene.supervisor.add(DECODE)
        await scene.die(1, ending=ending)
        if not ending.is_config_error:
            await scene.die(2, ending=ending)
        dropped = await event(scene, MemberDropped)
        assert dropped.spec == DECODE
        assert ending.last_words in dropped.reason
        assert [state.spec for state in scene.supervisor.members] == [ROUTER]
        assert not task.done()
        assert not router.is_stopped


async def test_one_that_is_let_go_while_it_waits_for_its_next_start_is_never_started_again() -> None:
    scene = Scene(Backoff())
    scene.time.may_wake = asyncio.Event()
    async with supervised(scene, DECODE):
        await scene.die(1)
        await event(scene, MemberDied)
        [state] = scene.supervisor.members
        assert state.obstacle == "died (exit code 1) and starts again within 0.5 s"
        scene.supervisor.let_go("decode-0")
        await has_left(scene, DECODE)
        assert len(scene.host.lives["decode-0"]) == 1


async def test_stopping_everything_cuts_a_drain_short_and_leaves_nobody() -> None:
    scene = Scene(Backoff())
    async with supervised(scene, DECODE) as task:
        member = await scene.host.life("decode-0", 1)
        member.may_stop = asyncio.Event()
        scene.supervisor.let_go("decode-0")
        await asyncio.wait_for(member.stopping.wait(), 5)
        member.stopping.clear()
        task.cancel()
        await asyncio.wait_for(member.stopping.wait(), 5)  # told again, which is more urgent
        assert not task.done()
        member.may_stop.set()
        await asyncio.wait({task}, timeout=5)
        assert member.is_stopped


async def event(scene: Scene, kind: type[E]) -> E:
    """The first one of its kind."""
    async with asyncio.timeout(5):
        while True:
            for each in scene.events:
                if isinstance(each, kind):
                    return each
            await asyncio.sleep(0)


async def has_left(scene: Scene, spec: MemberSpec) -> None:
    async with asyncio.timeout(5):
        while MemberLeft(spec) not in scene.events:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
