"""The seam between the workers and whatever moves the bytes. One conformance suite runs over every kind.

    P: sender.open(destination, ticket) → transfer.send(piece)* → transfer.commit(first_token) | transfer.abort()
    D: receiver.expect(transfer_id, ...) → on_piece(piece, release)* → await reception.committed() → close()

Ownership: `send` takes over the tensor it is given. `on_piece` lends verified staging memory that no transport touches
before `release`, and what is released the source may send more of. Nobody remote ever writes into a KV pool.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from common.identity import Ticket
from common.pb import kv_transfer_pb2 as pb

Release = Callable[[], None]  # from any thread, once
OnPiece = Callable[["KVPiece", Release], None]


@dataclass(frozen=True)
class Offer:
    """One way into a decode worker."""

    transport: str
    address: str  # in the transport's own form: host:port, or a socket's name


_TRANSPORTS_OF_VERSION_1 = ("grpc", "torch_dist")


@dataclass(frozen=True)
class Destination:
    """Where a decode worker receives KV, and which incarnation of it is meant."""

    incarnation: str
    offers: tuple[Offer, ...]  # fastest first; never empty
    protocol_version: int

    def __str__(self) -> str:
        return self.offers[0].address

    def to_pb(self) -> pb.Destination:
        known_to_all = [offer for offer in self.offers if offer.transport in _TRANSPORTS_OF_VERSION_1]
        first = (known_to_all or self.offers)[0]
        return pb.Destination(
            address=first.address,
            incarnation=self.incarnation,
            transport=first.transport,
            offers=[pb.Offer(transport=offer.transport, address=offer.address) for offer in self.offers],
            protocol_version=self.protocol_version,
        )

    @staticmethod
    def from_pb(message: pb.Destination) -> Destination:
        """A peer of protocol version 1 names one way only."""
        offers = tuple(Offer(offer.transport, offer.address) for offer in message.offers)
        first = Offer(message.transport, message.address)
        return Destination(message.incarnation, offers or (first,), message.protocol_version or 1)


@dataclass(frozen=True)
class KVPiece:
    """Layers [layer_start, layer_start + data.shape[0]) of tokens [token_start, token_start + data.shape[2]).

    data: contiguous [layers, 2 (K, V), tokens, kv_heads, head_dim] in the layout's dtype. kv_heads are those that the
    source holds when it is sent, those from head_start on that both sides hold when it lands.
    """

    layer_start: int
    token_start: int
    data: Tensor
    head_start: int = 0  # within the destination's own heads

    @property
    def num_layers(self) -> int:
        return self.data.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.data.shape[2]

    @property
    def num_bytes(self) -> int:
        return self.data.numel() * self.data.element_size()


@dataclass(frozen=True)
class TransferReceipt:
    """What one finished transfer moved."""

    num_pieces: int
    num_bytes: int


@dataclass(frozen=True)
class Committed:
    """The destination has every piece, verified: the sequence may run from this token on."""

    ticket: Ticket
    first_token: int
    receipt: TransferReceipt


@dataclass
class TransferStats:
    """Counters of one endpoint; plain numbers, exported by the worker."""

    transfers_committed: int = 0
    transfers_failed: int = 0
    pieces: int = 0
    bytes: int = 0
    stale_pieces: int = 0  # for an unknown, ended or replaced transfer: dropped
    pieces_rejected: dict[str, int] = field(default_factory=dict)  # by reason; stays empty in health
    quarantined: list[object] = field(default_factory=list)  # memory that a peer might still write to: kept for ever

    def as_counters(self) -> dict[str, int]:
        """By the names that docs/architecture.md lists, as Prometheus writes a series."""
        return {
            "kv_transfers_committed_total": self.transfers_committed,
            "kv_transfers_failed_total": self.transfers_failed,
            "kv_pieces_total": self.pieces,
            "kv_transfer_bytes_total": self.bytes,
            "kv_stale_pieces_total": self.stale_pieces,
            "quarantined_blocks": len(self.quarantined),
            **{f'kv_pieces_rejected_total{{reason="{why}"}}': count for why, count in self.pieces_rejected.items()},
        }


@dataclass(frozen=True)
class LinkSpeed:
    """What one link did when it was made."""

    bytes_per_s: float
    round_trip_s: float


@dataclass(frozen=True)
class LinkReport:
    """One link for the status page."""

    peer: str  # the other end's incarnation
    transport: str
    speed: LinkSpeed | None  # the source measures
    num_bytes: int  # of payload that it has carried since it was made


class OutgoingTransfer(Protocol):
    """One attempt at one transfer, on the source. Ends with commit or abort, whichever comes first."""

    @property
    def has_room(self) -> bool:
        """False while much is queued: produce no more until KVSender.on_room. From any thread."""

    @property
    def piece_bytes(self) -> int:
        """The size of piece that suits the link."""

    def send(self, piece: KVPiece) -> None:
        """Queue a piece and return at once. Safe to call from the engine's thread. Never raises for a lost peer:
        `commit` reports it. Pieces of an aborted transfer are dropped."""

    async def commit(self, first_token: int, timeout_s: float) -> TransferReceipt:
        """Send what is queued, then the commit, and wait for the destination's verdict.

        Raises: TransferTimeout, PeerLost, CorruptPiece, TransferAborted, IncompatiblePeer.
        """

    def abort(self) -> None:
        """Drop what is queued and tell the destination. Safe to call at any time, any number of times, from the
        event loop."""


class KVSender(Protocol):
    """The source's end: pooled, long-lived links, one per destination incarnation."""

    stats: TransferStats
    on_room: Callable[[], None]  # called on the event loop when a transfer has room again

    def links(self) -> list[LinkReport]: ...

    async def open(self, destination: Destination, ticket: Ticket) -> OutgoingTransfer:
        """Connect and handshake if this destination incarnation is new, then begin a transfer.

        Raises: PeerLost, IncompatiblePeer (naming the field and both values), TransferTimeout.
        """

    async def close(self) -> None:
        """Abort every transfer, close every link. Safe to call twice."""


class Reception(Protocol):
    """One expected transfer, on the destination. Lives as long as the reservation that it fills."""

    async def committed(self) -> Committed:
        """Wait until an attempt is complete and verified. A failed attempt leaves the reception open for the next
        one; only `close` ends the wait early (TransferAborted). No timeout of its own: the stream that holds the
        reservation bounds it."""

    def close(self) -> None:
        """From now on pieces for this transfer are stale. `on_piece` is not called again after this returns.
        Safe to call twice."""


class KVReceiver(Protocol):
    """The destination's end."""

    stats: TransferStats

    @property
    def destination(self) -> Destination: ...

    def links(self) -> list[LinkReport]: ...

    def expect(self, transfer_id: bytes, num_tokens: int, skip_tokens: int, on_piece: OnPiece) -> Reception:
        """Accept pieces for this transfer. `on_piece` is called on the event loop with each verified piece; a later
        attempt starts over and its pieces overwrite the earlier one's.

        Raises: InvalidRequest when the id is already expected.
        """

    async def close(self) -> None:
        """End every reception and link. Safe to call twice."""
