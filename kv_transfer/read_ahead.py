"""Reads requests ahead of whoever handles them: their payloads are on the way while earlier ones are awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from common.pb import kv_transfer_pb2 as pb
from kv_transfer.link import Arrival, ReceivedPayload
from kv_transfer.wire import PieceHeader

Read = Callable[[], Awaitable[pb.LinkRequest]]
Receive = Callable[[PieceHeader, pb.Piece], Awaitable[ReceivedPayload]]


class ReadAhead:
    """Arrivals in the order of their requests. What goes wrong shows after all that came before it."""

    def __init__(self, read: Read, receive: Receive, max_ahead: int) -> None:
        self._read = read
        self._receive = receive
        self._begun: asyncio.Queue[_Begun | Exception] = asyncio.Queue(max_ahead)
        self._task = asyncio.create_task(self._run(), name="kv-read-ahead")

    async def next(self) -> Arrival:
        """Raises: whatever reading or receiving raised."""
        begun = await self._begun.get()
        if isinstance(begun, Exception):
            raise begun
        return Arrival(begun.request, None if begun.payload is None else await begun.payload)

    async def close(self) -> None:
        """Safe to call twice."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        try:
            while True:
                await self._begun.put(self._begin(await self._read()))
        except Exception as error:
            await self._begun.put(error)  # raised again by `next`

    def _begin(self, request: pb.LinkRequest) -> _Begun:
        if not request.HasField("piece"):
            return _Begun(request)
        return _Begun(request, self._receive(PieceHeader.from_pb(request.piece), request.piece))


@dataclass(frozen=True)
class _Begun:
    request: pb.LinkRequest
    payload: Awaitable[ReceivedPayload] | None = None  # exactly with a piece
