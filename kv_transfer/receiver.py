"""The KVReceiver of every kind: what is expected, and the links that bring it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial

import grpc

from common.errors import InvalidRequest, PeerLost, TransferTimeout, VersionMismatch
from common.identity import Ticket
from common.kv_layout import KVLayout
from common.pb import kv_transfer_pb2 as pb
from kv_transfer.checksum import CHECKSUM
from kv_transfer.grpc_stream import add_link_service
from kv_transfer.link import Endpoint, PayloadDestination, Rendezvous, Reply
from kv_transfer.link_destination import DestinationLink
from kv_transfer.reception import ExpectedTransfer
from kv_transfer.transport import Destination, KVPiece, TransferStats
from kv_transfer.wire import PROTOCOL_VERSION


class LinkReceiver:
    """Made, used and closed on one event loop. Sources find it where `serve_at` says it is."""

    def __init__(
        self,
        endpoint: Endpoint,
        new_payloads: Callable[[], PayloadDestination],
        connect_timeout_s: float = 10.0,
    ) -> None:
        self.stats = TransferStats()
        self._endpoint = endpoint
        self._new_payloads = new_payloads
        self._connect_timeout_s = connect_timeout_s
        self._address: str | None = None
        self._expected: dict[bytes, ExpectedTransfer] = {}
        self._links: dict[asyncio.Timeout, asyncio.Event] = {}  # how to end one → set when it has ended
        self._is_closed = False

    def add_to_server(self, server: grpc.aio.Server) -> None:
        """Serve KVTransfer here, before the server starts."""
        add_link_service(self.serve, server)

    def serve_at(self, address: str) -> None:
        """The host:port that sources reach this receiver at, known once the server is bound."""
        self._address = address

    @property
    def destination(self) -> Destination:
        assert self._address is not None, "serve_at comes first"
        return Destination(self._address, self._endpoint.incarnation, self._endpoint.transport)

    def expect(
        self, transfer_id: bytes, num_tokens: int, skip_tokens: int, on_piece: Callable[[KVPiece], None]
    ) -> ExpectedTransfer:
        if transfer_id in self._expected:
            raise InvalidRequest(f"transfer {transfer_id.hex()} is expected already")
        if self._is_closed:
            raise PeerLost("this receiver is closed")

        def ticket(attempt: int, source_incarnation: str) -> Ticket:
            return Ticket(transfer_id, attempt, source_incarnation, self._endpoint.incarnation, num_tokens, skip_tokens)

        ticket(1, "any")  # refuses a malformed id or token range now, not at the first piece
        forget = partial(self._expected.pop, transfer_id, None)
        reception = self._expected[transfer_id] = ExpectedTransfer(ticket, self._endpoint.layout, on_piece, forget)
        return reception

    async def close(self) -> None:
        ended = list(self._links.values())
        if not self._is_closed:
            self._is_closed = True
            for reception in list(self._expected.values()):
                reception.close()
            for link in self._links:
                link.reschedule(0)
        for event in ended:
            await event.wait()

    async def serve(self, requests: AsyncIterator[pb.LinkRequest], reply: Reply) -> None:
        """One source's link, from its hello to its end; runs within one task.

        Raises: IncompatiblePeer, PeerLost, TransferTimeout; the source is to be told.
        """
        if self._is_closed:
            raise PeerLost(f"the receiver at {self._address} is closed")
        until_closed, ended = asyncio.timeout(None), asyncio.Event()
        self._links[until_closed] = ended
        try:
            async with until_closed:
                await self._serve_link(requests, reply)
        except TimeoutError as error:
            raise PeerLost(f"the receiver at {self._address} is closed") from error
        finally:
            del self._links[until_closed]
            ended.set()

    async def _serve_link(self, requests: AsyncIterator[pb.LinkRequest], reply: Reply) -> None:
        payloads = self._new_payloads()
        try:
            hello = await self._handshake(requests, reply, payloads)
            incarnations = (hello.source_incarnation, self._endpoint.incarnation)
            link = DestinationLink(incarnations, self._expected, payloads, self.stats)
            try:
                async for request in requests:
                    answer = await link.handle(request)
                    if answer is not None:
                        await reply(answer)
            finally:
                link.drop()
        finally:
            await payloads.close()

    async def _handshake(
        self, requests: AsyncIterator[pb.LinkRequest], reply: Reply, payloads: PayloadDestination
    ) -> pb.LinkHello:
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                first = await anext(requests)
                if first.WhichOneof("frame") != "hello":
                    raise VersionMismatch("a link begins with hello")
                self._require_acceptable(first.hello)
                host = self.destination.address.rpartition(":")[0]
                await reply(pb.LinkReply(welcome=self._welcome(await payloads.prepare(host))))
                await payloads.connect()
                return first.hello
        except StopAsyncIteration as error:
            raise PeerLost("the source left before its hello") from error
        except TimeoutError as error:
            raise TransferTimeout(f"the handshake took more than {self._connect_timeout_s} s") from error

    def _require_acceptable(self, hello: pb.LinkHello) -> None:
        mine = self._endpoint
        if hello.protocol_version != PROTOCOL_VERSION:
            raise VersionMismatch(
                f"KV transfer protocol versions differ: this side speaks {PROTOCOL_VERSION}, "
                f"the source speaks {hello.protocol_version}"
            )
        if hello.destination_incarnation != mine.incarnation:
            raise PeerLost(
                f"{self._address} is now incarnation {mine.incarnation}, not {hello.destination_incarnation}"
            )
        if hello.transport != mine.wire_name:
            raise VersionMismatch(
                f"transports differ: this side receives over {mine.wire_name!r}, the source has {hello.transport!r}"
            )
        if hello.checksum != CHECKSUM.name:
            raise VersionMismatch(
                f"checksums differ: this side computes {CHECKSUM.name!r}, the source {hello.checksum!r}; "
                "install the package xxhash on both sides or on neither"
            )
        mine.layout.require_compatible(KVLayout.from_pb(hello.layout))

    def _welcome(self, rendezvous: Rendezvous) -> pb.LinkWelcome:
        return pb.LinkWelcome(
            protocol_version=PROTOCOL_VERSION,
            layout=self._endpoint.layout.to_pb(),
            store_address=rendezvous.store_address,
            group_name=rendezvous.group_name,
        )
