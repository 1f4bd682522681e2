"""The process that starts and stops this deployment's workers, where there is one: `pdserve up`, on an open stream."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator

from common.errors import InvalidRequest, ServingError, WorkerUnavailable, error_types
from common.pb import serving_pb2 as pb

ANSWER_S = 5.0  # from an order to its outcome: the supervisor only takes note


class Supervision:
    """Its pools as it last told them, and orders for it. Of two supervisors the one that came last counts: the other
    is its former self, whose stream has not ended yet."""

    def __init__(self) -> None:
        self._stream: _Stream | None = None

    @property
    def pools(self) -> list[pb.PoolStatus]:
        return [] if self._stream is None else self._stream.pools

    async def scale(self, wish: pb.ScalePoolRequest) -> None:
        """Raises: InvalidRequest when the supervisor refuses; WorkerUnavailable when none is there to answer."""
        if wish.role not in (pb.ROLE_PREFILL, pb.ROLE_DECODE, pb.ROLE_COLOCATED):
            raise InvalidRequest("a wish names the pool that it is about", param="role")
        if self._stream is None:
            raise WorkerUnavailable("nobody supervises these workers: only what `pdserve up` has started can be scaled")
        await self._stream.ask(wish)

    async def supervise(self, reports: AsyncIterator[pb.SupervisorReport]) -> AsyncGenerator[pb.ScaleOrder]:
        """Orders for as long as the supervisor's reports come."""
        stream = self._stream = _Stream()
        reading = asyncio.create_task(stream.read(reports), name="supervisor's reports")
        try:
            while (order := await stream.orders.get()) is not None:
                yield order
        finally:
            if self._stream is stream:
                self._stream = None
            stream.close()
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


class _Stream:
    """Of one supervisor."""

    def __init__(self) -> None:
        self.pools: list[pb.PoolStatus] = []
        self.orders: asyncio.Queue[pb.ScaleOrder | None] = asyncio.Queue()  # None: no more will come
        self._ids = itertools.count(1)
        self._outcomes: dict[int, asyncio.Future[pb.ScaleOutcome]] = {}

    async def read(self, reports: AsyncIterator[pb.SupervisorReport]) -> None:
        try:
            async for report in reports:
                self.pools = list(report.pools)
                waiting = self._outcomes.get(report.outcome.order_id)
                if waiting is not None and not waiting.done():
                    waiting.set_result(report.outcome)
        finally:
            self.orders.put_nowait(None)

    async def ask(self, wish: pb.ScalePoolRequest) -> None:
        order = pb.ScaleOrder(order_id=next(self._ids), role=wish.role, replicas=wish.replicas)
        waiting = self._outcomes[order.order_id] = asyncio.get_running_loop().create_future()
        self.orders.put_nowait(order)
        try:
            outcome = await asyncio.wait_for(waiting, ANSWER_S)
        except TimeoutError:
            raise WorkerUnavailable(f"`pdserve up` has not answered within {ANSWER_S:g} s") from None
        finally:
            del self._outcomes[order.order_id]
        if outcome.error_type:
            raise error_types().get(outcome.error_type, ServingError)(outcome.error)

    def close(self) -> None:
        for waiting in self._outcomes.values():
            if not waiting.done():
                waiting.set_exception(WorkerUnavailable("`pdserve up` has gone before it answered"))
