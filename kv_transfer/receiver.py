"""The KVReceiver of every kind: what is expected, and the links that bring it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial

import grpc
import torch

from common.errors import IncompatiblePeer, InvalidRequest, Overloaded, PeerLost, TransferTimeout
from common.identity import Ticket
from common.pb import kv_transfer_pb2 as pb
from common.transfer_config import MIB, TransferConfig
from kv_transfer.codec import PieceCodec
from kv_transfer.credit import FreedBytes
from kv_transfer.grpc_stream import GrpcListener, add_link_service
from kv_transfer.handshake import Agreement, agreed_by_destination, new_welcome, receive_hello
from kv_transfer.link import DestinationChannel, Endpoint, Landing, Listener
from kv_transfer.link_destination import DestinationLink
from kv_transfer.reception import ExpectedTransfer
from kv_transfer.staging import FreshStaging, StagingRing, new_ring
from kv_transfer.transport import Destination, LinkReport, Offer, OnPiece, TransferStats
from kv_transfer.wire import PROTOCOL_VERSION

logger = logging.getLogger(__name__)

_MAX_REPLIES = 1024  # waiting to be written; a source that does not read its replies is read no further


class LinkReceiver:
    """Made, used and closed on one event loop. Its listeners bring it channels.

    Staging memory is bounded: `window_bytes` and one largest piece for each of at most `max_links` links.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        listeners: Sequence[Listener],
        staging_device: Callable[[str], torch.device],
        config: TransferConfig,
        stats: TransferStats | None = None,
    ) -> None:
        """listeners: fastest first. staging_device: where a transport's pieces land."""
        self.stats = stats or TransferStats()
        self._endpoint = endpoint
        self._listeners = listeners
        self._staging_device = staging_device
        self._config = config
        self._offers: list[Offer] = []
        self._expected: dict[bytes, ExpectedTransfer] = {}
        self._links: dict[asyncio.Timeout, asyncio.Event] = {}  # how to end one → set when it has ended
        self._num_admitted = 0  # links whose sources have proved themselves
        self._admitted: dict[DestinationLink, tuple[str, str]] = {}  # its source's incarnation, and its transport
        self._is_closed = False

    def add_to_server(self, server: grpc.aio.Server) -> None:
        """Whatever is served over gRPC, before the server starts."""
        add_link_service([listener for listener in self._listeners if isinstance(listener, GrpcListener)], server)

    async def open(self, worker_address: str) -> None:
        """Listen. worker_address: host:port of the worker's own gRPC server, which is bound."""
        for listener in self._listeners:
            serve = partial(self.serve, staging_device=self._staging_device(listener.transport))
            self._offers.append(Offer(listener.transport, await listener.open(worker_address, serve)))

    @property
    def destination(self) -> Destination:
        assert self._offers, "open comes first"
        return Destination(self._endpoint.incarnation, tuple(self._offers), PROTOCOL_VERSION)

    def links(self) -> list[LinkReport]:
        return [LinkReport(peer, name, None, link.num_bytes) for link, (peer, name) in self._admitted.items()]

    def expect(self, transfer_id: bytes, num_tokens: int, skip_tokens: int, on_piece: OnPiece) -> ExpectedTransfer:
        if transfer_id in self._expected:
            raise InvalidRequest(f"transfer {transfer_id.hex()} is expected already")
        if self._is_closed:
            raise PeerLost("this receiver is closed")

        def ticket(attempt: int, source_incarnation: str) -> Ticket:
            return Ticket(transfer_id, attempt, source_incarnation, self._endpoint.incarnation, num_tokens, skip_tokens)

        ticket(1, "any")  # refuses a malformed id or token range now, not at the first piece
        forget = partial(self._expected.pop, transfer_id, None)
        num_heads = len(self._endpoint.heads)
        reception = self._expected[transfer_id] = ExpectedTransfer(ticket, num_heads, on_piece, forget)
        return reception

    async def close(self) -> None:
        for listener in self._listeners:
            await listener.close()
        ended = list(self._links.values())
        if not self._is_closed:
            self._is_closed = True
            for reception in list(self._expected.values()):
                reception.close()
            for link in self._links:
                link.reschedule(0)
        for event in ended:
            await event.wait()

    async def serve(self, channel: DestinationChannel, staging_device: torch.device) -> None:
        """One source's link, from its hello to its end; runs within one task, and closes the channel.

        Raises: IncompatiblePeer, PeerLost, TransferTimeout, Overloaded; the source is to be told.
        """
        try:
            if self._is_closed:
                raise PeerLost("this receiver is closed")
            async with self._until_closed():
                await self._serve_link(channel, staging_device)
        except IncompatiblePeer as error:
            logger.warning("refused a KV link over %s: %s", channel.wire_name, error.message)
            raise
        finally:
            await channel.close()

    @asynccontextmanager
    async def _until_closed(self) -> AsyncIterator[None]:
        until_closed, ended = asyncio.timeout(None), asyncio.Event()
        self._links[until_closed] = ended
        try:
            async with until_closed:
                yield
        except TimeoutError as error:
            raise PeerLost("this receiver is closed") from error
        finally:
            del self._links[until_closed]
            ended.set()

    async def _serve_link(self, channel: DestinationChannel, staging_device: torch.device) -> None:
        with ExitStack() as admitted:
            landed = await self._handshake(channel, staging_device, admitted)
            link = DestinationLink(landed.agreement, landed.codec, self._expected, self.stats)
            self._admitted[link] = (landed.agreement.source_incarnation, channel.wire_name)
            try:
                await _Conversation(channel, link, landed.ring, landed.freed).run()
            finally:
                del self._admitted[link]
                link.drop()

    async def _handshake(
        self, channel: DestinationChannel, staging_device: torch.device, admitted: ExitStack
    ) -> _Landed:
        """What the link costs this worker, a place and memory, is spent once the source has proved itself: a stranger
        neither takes them nor hears that there are none."""
        mine = self._endpoint
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                hello, proof = await receive_hello(channel, mine)
                admitted.enter_context(self._place())
                freed = FreedBytes(self._config.window_bytes)
                ring = self._new_ring(staging_device, freed)
                agreement = agreed_by_destination(hello, mine, self._config.window_bytes)
                codec = PieceCodec(mine.layout, agreement.heads, mine.heads, mine.wire_dtype)
                staging = FreshStaging(staging_device) if agreement.credit_bytes is None else ring
                welcome = new_welcome(mine, agreement, proof)
                await channel.prepare(welcome, Landing(staging, codec))
                await channel.write(pb.LinkReply(welcome=welcome))
                await channel.attach()
                return _Landed(agreement, codec, ring, freed)
        except TimeoutError as error:
            raise TransferTimeout(f"the handshake took more than {self._config.connect_timeout_s} s") from error

    @contextmanager
    def _place(self) -> Iterator[None]:
        if self._num_admitted >= self._config.max_links:
            raise Overloaded(f"{self._config.max_links} KV links are open; raise transfer.max_links for more sources")
        self._num_admitted += 1
        try:
            yield
        finally:
            self._num_admitted -= 1

    def _new_ring(self, device: torch.device, freed: FreedBytes) -> StagingRing:
        try:
            return new_ring(self._config.window_bytes, device, freed.add)
        except (RuntimeError, MemoryError) as error:  # torch's words for it
            mib = self._config.window_bytes // MIB
            raise Overloaded(f"no memory to stage {mib} MiB of KV; lower transfer.window_mib") from error


@dataclass(frozen=True)
class _Landed:
    """What the destination's side of a handshake leaves behind."""

    agreement: Agreement
    codec: PieceCodec
    ring: StagingRing
    freed: FreedBytes


class _Conversation:
    """Frames in, replies and credit out, until the source leaves."""

    def __init__(
        self,
        channel: DestinationChannel,
        link: DestinationLink,
        ring: StagingRing,
        freed: FreedBytes,
    ) -> None:
        self._channel = channel
        self._link = link
        self._ring = ring
        self._freed = freed
        self._replies: asyncio.Queue[pb.LinkReply] = asyncio.Queue(_MAX_REPLIES)

    async def run(self) -> None:
        """Raises: PeerLost when the source has left, and whatever else ends the link."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._write_replies())
                tasks.create_task(self._give_credit())
                tasks.create_task(self._read_frames())
        except* Exception as ended:
            raise ended.exceptions[0] from None

    async def _read_frames(self) -> None:
        while True:
            reply = self._link.handle(await self._channel.read())
            if reply is not None:
                await self._replies.put(reply)

    async def _write_replies(self) -> None:
        while True:
            await self._channel.write(await self._replies.get())

    async def _give_credit(self) -> None:
        while True:
            num_bytes = await self._freed.next_credit(lambda: self._ring.num_taken_bytes)
            await self._replies.put(pb.LinkReply(credit=pb.LinkCredit(num_bytes=num_bytes)))
