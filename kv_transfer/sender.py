"""The KVSender of every kind: one pooled link per destination incarnation, dialled on first use."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager

from common.errors import IncompatiblePeer, PeerLost, ServingError, TransferError, TransferTimeout
from common.identity import Ticket
from common.transfer_config import TransferConfig
from kv_transfer.handshake import greet
from kv_transfer.link import Endpoint, Way
from kv_transfer.link_source import LinkContext, SourceLink
from kv_transfer.outgoing import LinkedTransfer
from kv_transfer.transport import Destination, LinkReport, Offer, TransferStats

logger = logging.getLogger(__name__)


class LinkSender:
    """Owns the links. Its event loop is the one that calls `open` first.

    `ways` are the transports that this process may use. Among a destination's offers the first one wins that is among
    them and connects; an incompatible peer is refused, not tried another way.
    """

    def __init__(
        self, endpoint: Endpoint, ways: Sequence[Way], config: TransferConfig, stats: TransferStats | None = None
    ) -> None:
        self.stats = stats or TransferStats()
        self.on_room: Callable[[], None] = lambda: None
        self._endpoint = endpoint
        self._ways = {way.transport: way for way in ways}
        self._config = config
        self._links: dict[Destination, asyncio.Task[SourceLink]] = {}
        self._is_closed = False

    def links(self) -> list[LinkReport]:
        return [
            LinkReport(destination.incarnation, link.transport, link.speed, link.num_bytes)
            for destination, task in self._links.items()
            if task.done() and not _is_dead(task)
            for link in [task.result()]
        ]

    async def open(self, destination: Destination, ticket: Ticket) -> LinkedTransfer:
        assert ticket.source_incarnation == self._endpoint.incarnation, "a ticket names its own source"
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
            task = asyncio.create_task(self._connect(destination), name=f"kv-connect-{destination}")
            self._links[destination] = task
        return await asyncio.shield(task)

    async def _connect(self, destination: Destination) -> SourceLink:
        """By the first offer that works."""
        offers = [offer for offer in destination.offers if offer.transport in self._ways]
        if not offers:
            raise IncompatiblePeer(
                f"transports differ: this side sends over {sorted(self._ways)}, "
                f"{destination} receives over {[offer.transport for offer in destination.offers]}"
            )
        for offer in offers[:-1]:
            try:
                return await self._connect_by(offer, destination)
            except TransferError as error:
                logger.info("%s at %s cannot be used: %s", offer.transport, offer.address, error.message)
        return await self._connect_by(offers[-1], destination)

    async def _connect_by(self, offer: Offer, destination: Destination) -> SourceLink:
        """Dial, handshake and measure. Only a handshake proves which incarnation holds an address, so links to another
        incarnation at the same address are torn down once it has succeeded and before anything is sent."""
        channel = self._ways[offer.transport].dial(offer.address)
        async with AsyncExitStack() as undo:
            undo.push_async_callback(channel.close)
            with _handshake_errors(offer, self._config.connect_timeout_s):
                async with asyncio.timeout(self._config.connect_timeout_s):
                    agreement = await greet(channel, self._endpoint, destination)
                    await self._close_others_at(offer, destination)
                    link = SourceLink(channel, agreement, self._context(offer))
                    undo.push_async_callback(link.close)
                    await link.measure()
            undo.pop_all()
        logger.info("KV link to %s over %s: %s", offer.address, link.transport, link.speed)
        return link

    def _context(self, offer: Offer) -> LinkContext:
        return LinkContext(
            peer=offer.address,
            endpoint=self._endpoint,
            stats=self.stats,
            on_room=lambda: self.on_room(),
            stall_timeout_s=self._config.stall_timeout_s,
            piece_bytes=self._config.piece_bytes,
            way=self._ways[offer.transport],
        )

    async def _close_others_at(self, offer: Offer, destination: Destination) -> None:
        others = [other for other in self._links if offer in other.offers and other != destination]
        for other in others:
            task = self._links[other]
            if task.done():  # one that is still dialling will be refused by the address's new holder
                del self._links[other]
                await _close_link(task)


@contextmanager
def _handshake_errors(offer: Offer, timeout_s: float) -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise TransferTimeout(f"the handshake with {offer.address} took more than {timeout_s} s") from error
    except IncompatiblePeer as error:
        logger.warning("no KV link to %s: %s", offer.address, error.message)
        raise
    except TransferError:
        raise
    except ServingError as error:
        raise PeerLost(f"{offer.address} refused the KV link: {error.message}") from error


def _is_dead(task: asyncio.Task[SourceLink]) -> bool:
    """The attempt failed, or the link it made is gone."""
    if not task.done():
        return False
    return task.cancelled() or task.exception() is not None or not task.result().is_alive


async def _close_link(task: asyncio.Task[SourceLink]) -> None:
    await asyncio.wait([task])
    if not task.cancelled() and task.exception() is None:
        await task.result().close()
