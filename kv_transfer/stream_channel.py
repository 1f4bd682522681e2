"""Channels made of a message stream and a way for payloads: inside the messages, or beside them."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from typing import Protocol

from torch import Tensor

from common.errors import PeerLost
from common.pb import kv_transfer_pb2 as pb
from kv_transfer.link import Arrival, Landing, PackedPayload, ReceivedPayload
from kv_transfer.read_ahead import ReadAhead
from kv_transfer.wire import PieceHeader

Reply = Callable[[pb.LinkReply], Awaitable[None]]
WriteRequest = Callable[[pb.LinkRequest], Awaitable[None]]
NextRequest = Callable[[], Awaitable[pb.LinkRequest]]


class LinkStream(Protocol):
    """The source's end of a message stream. A lost or refusing peer shows as a ServingError."""

    async def write(self, request: pb.LinkRequest) -> None:
        """Connects on the first call."""

    async def read(self) -> pb.LinkReply: ...

    async def close(self) -> None:
        """Safe to call twice."""


class PayloadSource(Protocol):
    """Calls never overlap, apart from close."""

    name: str  # must be the same on both sides

    async def attach(self, welcome: pb.LinkWelcome, write: WriteRequest) -> None:
        """write: a request that the destination's `attach` reads. Raises: PeerLost."""

    async def pack(self, flat: Tensor) -> PackedPayload: ...

    async def put(self, piece: pb.Piece, flat: Tensor) -> None:
        """Before the message is written: what goes into it or ahead of it."""

    async def push(self, flat: Tensor) -> None:
        """After it has been written: what follows it, in the order of the calls. May return before it is sent.

        Raises: PeerLost, for this payload or an earlier one.
        """

    def on_credit(self, num_bytes: int) -> None:
        """The destination has let go of as much, oldest first."""

    async def close(self) -> None:
        """Safe to call twice."""


class PayloadDestination(Protocol):
    """Calls never overlap, apart from close."""

    name: str
    max_ahead: int  # payloads that may be awaited at once

    async def prepare(self, welcome: pb.LinkWelcome, landing: Landing) -> None: ...

    async def attach(self, read: NextRequest) -> None:
        """Raises: PeerLost."""

    def receive(self, header: PieceHeader, piece: pb.Piece) -> Awaitable[ReceivedPayload]:
        """Begin, in the order of the calls; await the outcome, in the same order.

        Raises: PeerLost when the payloads cannot go on, StagingOverrun; from the call and from the outcome.
        """

    async def close(self) -> None: ...


class StreamSource:
    """A SourceChannel."""

    def __init__(self, transport: str, stream: LinkStream, payloads: PayloadSource) -> None:
        self.wire_name = f"{transport}/{payloads.name}"
        self._stream = stream
        self._payloads = payloads

    async def pack(self, flat: Tensor) -> PackedPayload:
        return await self._payloads.pack(flat)

    async def write(self, request: pb.LinkRequest, payload: Tensor | None = None) -> None:
        if payload is None:
            await self._stream.write(request)
            return
        await self._payloads.put(request.piece, payload)
        await self._stream.write(request)
        await self._payloads.push(payload)

    async def read(self) -> pb.LinkReply:
        reply = await self._stream.read()
        if reply.HasField("credit"):
            self._payloads.on_credit(reply.credit.num_bytes)
        return reply

    async def attach(self, welcome: pb.LinkWelcome) -> None:
        await self._payloads.attach(welcome, self._stream.write)

    async def close(self) -> None:
        await self._payloads.close()
        await self._stream.close()


class StreamDestination:
    """A DestinationChannel. `write` is the stream's own, which ends with the call that serves it."""

    def __init__(
        self, transport: str, requests: AsyncIterable[pb.LinkRequest], write: Reply, payloads: PayloadDestination
    ) -> None:
        self.wire_name = f"{transport}/{payloads.name}"
        self._requests = requests
        self._iterator: AsyncIterator[pb.LinkRequest] | None = None  # gRPC's own complains if it is made and not used
        self._write = write
        self._payloads = payloads
        self._is_prepared = False  # for pieces, which a stranger never is
        self._ahead: ReadAhead | None = None

    async def read(self) -> Arrival:
        if self._ahead is not None:
            return await self._ahead.next()
        request = await self._next_request()
        if not request.HasField("piece"):
            return Arrival(request)
        if not self._is_prepared:
            raise PeerLost("a link begins with hello")
        return Arrival(request, await self._payloads.receive(PieceHeader.from_pb(request.piece), request.piece))

    async def write(self, reply: pb.LinkReply) -> None:
        await self._write(reply)

    def trust(self) -> None:
        """A call ends with its status in any case."""

    async def prepare(self, welcome: pb.LinkWelcome, landing: Landing) -> None:
        await self._payloads.prepare(welcome, landing)
        self._is_prepared = True

    async def attach(self) -> None:
        await self._payloads.attach(self._next_request)
        if self._payloads.max_ahead > 1:
            self._ahead = ReadAhead(self._next_request, self._payloads.receive, self._payloads.max_ahead)

    async def close(self) -> None:
        await self._payloads.close()
        if self._ahead is not None:
            await self._ahead.close()

    async def _next_request(self) -> pb.LinkRequest:
        if self._iterator is None:
            self._iterator = aiter(self._requests)
        try:
            return await anext(self._iterator)
        except StopAsyncIteration:
            raise PeerLost("the source has left") from None
