"""Who asks a router whose workers are about to come (back) waits a moment; who asks one without workers does not."""

from __future__ import annotations

import asyncio

import pytest

from common.pb import serving_pb2 as pb
from router.prefix_index import PrefixIndex
from router.readiness import RETURN_S, Readiness
from router.registry import Registry
from router.worker import Worker


class Life:
    """A router's time, and whether it can serve."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.reason: str | None = "no worker"
        self.ready_at_s = float("inf")
        self.readiness = Readiness(lambda: self.reason, lambda: self.now_s, self._sleep)

    async def _sleep(self, seconds: float) -> None:
        self.now_s += seconds
        if self.now_s >= self.ready_at_s:
            self.reason = None

    async def waited_s(self) -> float:
        start_s = self.now_s
        await asyncio.wait_for(self.readiness.wait(), 10)
        return self.now_s - start_s


async def test_a_new_router_waits_for_its_workers() -> None:
    life = Life()
    life.ready_at_s = 100.5
    assert await life.waited_s() == pytest.approx(0.5, abs=0.05)


async def test_a_router_that_has_had_its_time_refuses_at_once() -> None:
    life = Life()
    assert await life.waited_s() == pytest.approx(RETURN_S, abs=0.05)
    assert await life.waited_s() == 0


async def test_a_router_that_can_serve_never_waits() -> None:
    life = Life()
    life.reason = None
    assert await life.waited_s() == 0


def test_how_long_nobody_could_serve_counts_from_the_last_moment_when_somebody_could() -> None:
    life = Life()
    life.reason = None
    life.readiness.note()
    life.reason = "no worker"
    life.now_s += 7
    assert life.readiness.unready_s() == 7
    life.reason = None
    assert life.readiness.unready_s() == 0


async def test_a_router_that_lost_everybody_waits_from_then_on() -> None:
    life = Life()
    life.now_s += 60
    life.reason = None
    life.readiness.note()  # the first one leaves
    life.reason = "no worker"
    life.readiness.note()  # and so does the last
    life.ready_at_s = 160.7
    assert await life.waited_s() == pytest.approx(0.7, abs=0.05)


async def test_a_registry_waits_for_a_worker_that_comes_back() -> None:
    registry = Registry("tiny", PrefixIndex(10), must_check_pairs=False)
    hello = pb.WorkerHello(worker_id="colocated-0", role=pb.ROLE_COLOCATED, model="tiny", incarnation="a")
    registry.join(Worker(hello))
    registry.leave(registry.workers[0])
    waiting = asyncio.create_task(registry.until_ready())
    await asyncio.sleep(0)
    assert not waiting.done()
    registry.join(Worker(hello))
    await asyncio.wait_for(waiting, 10)
    assert registry.not_ready_reason() is None
