"""The router between `pdserve scale` and `pdserve up`: who is asked, what is answered, and what if nobody is there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from common.errors import InvalidRequest, WorkerUnavailable
from common.pb import serving_pb2 as pb
from router import supervision
from router.supervision import Supervision

WISH = pb.ScalePoolRequest(role=pb.ROLE_DECODE, replicas=2)


class Supervisor:
    """One end of its stream: what it reports, and the orders that it gets."""

    def __init__(self, router: Supervision) -> None:
        self._reports: asyncio.Queue[pb.SupervisorReport | None] = asyncio.Queue()
        self.orders: list[pb.ScaleOrder] = []
        self._router = router

    def report(self, **fields: object) -> None:
        self._reports.put_nowait(pb.SupervisorReport(**fields))

    def go(self) -> None:
        self._reports.put_nowait(None)

    async def serve(self, *outcomes: pb.ScaleOutcome) -> None:
        """Answers each order with the next outcome, and ends when it goes."""
        answers = iter(outcomes)
        async with aclosing(self._router.supervise(self._stream())) as orders:
            async for order in orders:
                self.orders.append(order)
                for outcome in answers:
                    outcome.order_id = order.order_id
                    self.report(outcome=outcome, pools=[pb.PoolStatus(role=order.role, wished=order.replicas)])
                    break

    async def _stream(self) -> AsyncIterator[pb.SupervisorReport]:
        while (report := await self._reports.get()) is not None:
            yield report


async def test_a_wish_is_passed_on_and_its_outcome_comes_with_the_pools_that_it_made() -> None:
    router = Supervision()
    supervisor = Supervisor(router)
    serving = asyncio.create_task(supervisor.serve(pb.ScaleOutcome()))
    await asyncio.sleep(0)
    await asyncio.wait_for(router.scale(WISH), 5)
    assert [(order.role, order.replicas) for order in supervisor.orders] == [(pb.ROLE_DECODE, 2)]
    assert [pool.wished for pool in router.pools] == [2]
    supervisor.go()
    await asyncio.wait_for(serving, 5)
    assert router.pools == []


async def test_a_refusal_keeps_its_type_and_the_next_wish_is_heard() -> None:
    router = Supervision()
    supervisor = Supervisor(router)
    refusal = pb.ScaleOutcome(error_type="InvalidRequest", error="nothing could be served")
    serving = asyncio.create_task(supervisor.serve(refusal, pb.ScaleOutcome()))
    await asyncio.sleep(0)
    with pytest.raises(InvalidRequest, match="nothing could be served"):
        await asyncio.wait_for(router.scale(WISH), 5)
    await asyncio.wait_for(router.scale(WISH), 5)
    supervisor.go()
    await asyncio.wait_for(serving, 5)


async def test_without_a_supervisor_a_wish_is_refused_at_once() -> None:
    with pytest.raises(WorkerUnavailable, match="only what `pdserve up` has started can be scaled"):
        await Supervision().scale(WISH)


async def test_a_wish_without_a_pool_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="names the pool"):
        await Supervision().scale(pb.ScalePoolRequest(replicas=2))


async def test_a_supervisor_that_goes_before_it_answers_fails_the_wish() -> None:
    router = Supervision()
    supervisor = Supervisor(router)
    serving = asyncio.create_task(supervisor.serve())
    await asyncio.sleep(0)
    asking = asyncio.create_task(router.scale(WISH))
    while not supervisor.orders:
        await asyncio.sleep(0)
    supervisor.go()
    with pytest.raises(WorkerUnavailable, match="has gone before it answered"):
        await asyncio.wait_for(asking, 5)
    await asyncio.wait_for(serving, 5)


async def test_a_supervisor_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "ANSWER_S", 0.05)
    router = Supervision()
    serving = asyncio.create_task(Supervisor(router).serve())
    await asyncio.sleep(0)
    with pytest.raises(WorkerUnavailable, match="has not answered"):
        await asyncio.wait_for(router.scale(WISH), 5)
    serving.cancel()


async def test_of_two_supervisors_the_later_is_asked_also_when_the_earlier_ends_after_it() -> None:
    router = Supervision()
    former, present = Supervisor(router), Supervisor(router)
    ending = asyncio.create_task(former.serve())
    await asyncio.sleep(0)
    serving = asyncio.create_task(present.serve(pb.ScaleOutcome()))
    await asyncio.sleep(0)
    former.go()
    await asyncio.wait_for(ending, 5)
    await asyncio.wait_for(router.scale(WISH), 5)
    assert (len(former.orders), len(present.orders)) == (0, 1)
    present.go()
    await asyncio.wait_for(serving, 5)
