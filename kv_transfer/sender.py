"""The KVSender of every kind: one pooled link per destination incarnation, dialled on first use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager

from common.errors import IncompatiblePeer, PeerLost, ServingError, TransferError, TransferTimeout, VersionMismatch
from common.identity import Ticket
from common.kv_layout import KVLayout
from common.pb import kv_transfer_pb2 as pb
from kv_transfer.checksum import CHECKSUM
from kv_transfer.link import Dial, Endpoint, LinkStream, PayloadSource, Rendezvous
from kv_transfer.link_source import LinkedTransfer, SourceLink
from kv_transfer.transport import Destination, TransferStats
from kv_transfer.wire import PROTOCOL_VERSION


class LinkSender:
    """Owns the links. Its event loop is the one that calls `open` first."""

    def __init__(
        self,
        endpoint: Endpoint,
        dial: Dial,
        new_payloads: Callable[[], PayloadSource],
        connect_timeout_s: float = 10.0,
    ) -> None:
        self.stats = TransferStats()
        self._endpoint = endpoint
        self._dial = dial
        self._new_payloads = new_payloads
        self._connect_timeout_s = connect_timeout_s
        self._links: dict[Destination, asyncio.Task[SourceLink]] = {}
        self._is_closed = False

    async def open(self, destination: Destination, ticket: Ticket) -> LinkedTransfer:
        assert ticket.source_incarnation == self._endpoint.incarnation, "a ticket names its own source"
        if destination.transport != self._endpoint.transport:
            raise IncompatiblePeer(
                f"transports differ: this side sends over {self._endpoint.transport!r}, "
                f"{destination.address} receives over {destination.transport!r}"
            )
        if ticket.destination_incarnation != destination.incarnation:
            raise PeerLost(f"the ticket is for {ticket.destination_incarnation}, not for {destination.incarnation}")
        link = await self._link_to(destination)
        return link.begin(ticket)

    async def close(self) -> None:
        self._is_closed = True
        connecting, self._links = list(self._links.values()), {}
        for task in connecting:
            task.cancel()
        for task in connecting:
            await _close_link(task)

    async def _link_to(self, destination: Destination) -> SourceLink:
        """The pooled link, or a new one; callers that come while it is being made wait for the same attempt."""
        if self._is_closed:
            raise PeerLost("this sender is closed")
        task = self._links.get(destination)
        if task is None or _is_dead(task):
            self._links = {other: made for other, made in self._links.items() if not _is_dead(made)}
            task = asyncio.create_task(self._connect(destination), name=f"kv-connect-{destination.address}")
            self._links[destination] = task
        return await asyncio.shield(task)

    async def _connect(self, destination: Destination) -> SourceLink:
        """Dial and handshake. The payload channel is connected before the first transfer begins.

        Only a handshake proves which incarnation holds an address, so links to another incarnation at the same
        address are torn down once it has succeeded and before anything is sent.
        """
        stream, payloads = self._dial(destination), self._new_payloads()
        async with AsyncExitStack() as undo:
            undo.push_async_callback(stream.close)
            undo.push_async_callback(payloads.close)
            with _handshake_errors(destination, self._connect_timeout_s):
                async with asyncio.timeout(self._connect_timeout_s):
                    await payloads.connect(await self._handshake(stream, destination))
                    await self._close_others_at(destination)
            undo.pop_all()
        return SourceLink(destination.address, stream, payloads, self.stats)

    async def _handshake(self, stream: LinkStream, destination: Destination) -> Rendezvous:
        hello = pb.LinkHello(
            protocol_version=PROTOCOL_VERSION,
            source_incarnation=self._endpoint.incarnation,
            destination_incarnation=destination.incarnation,
            layout=self._endpoint.layout.to_pb(),
            transport=self._endpoint.wire_name,
            checksum=CHECKSUM.name,
        )
        await stream.write(pb.LinkRequest(hello=hello))
        reply = await stream.read()
        if reply.WhichOneof("frame") != "welcome":
            raise VersionMismatch(f"{destination.address} does not answer hello with welcome")
        welcome = reply.welcome
        if welcome.protocol_version != PROTOCOL_VERSION:
            raise VersionMismatch(
                f"KV transfer protocol versions differ: this side speaks {PROTOCOL_VERSION}, "
                f"{destination.address} speaks {welcome.protocol_version}"
            )
        self._endpoint.layout.require_compatible(KVLayout.from_pb(welcome.layout))
        return Rendezvous(welcome.store_address, welcome.group_name)

    async def _close_others_at(self, destination: Destination) -> None:
        others = [other for other in self._links if other.address == destination.address and other != destination]
        for other in others:
            task = self._links[other]
            if task.done():  # one that is still dialling will be refused by the address's new holder
                del self._links[other]
                await _close_link(task)


@contextmanager
def _handshake_errors(destination: Destination, timeout_s: float) -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise TransferTimeout(f"the handshake with {destination.address} took more than {timeout_s} s") from error
    except (TransferError, IncompatiblePeer):
        raise
    except ServingError as error:
        raise PeerLost(f"{destination.address} refused the KV link: {error.message}") from error


def _is_dead(task: asyncio.Task[SourceLink]) -> bool:
    """The attempt failed, or the link it made is gone."""
    if not task.done():
        return False
    return task.cancelled() or task.exception() is not None or not task.result().is_alive


async def _close_link(task: asyncio.Task[SourceLink]) -> None:
    await asyncio.wait([task])
    if not task.cancelled() and task.exception() is None:
        await task.result().close()
