"""The seam between the workers and whatever moves the bytes. One conformance suite runs over every kind.

    P: sender.open(destination, ticket) → transfer.send(piece)* → transfer.commit(first_token) | transfer.abort()
    D: receiver.expect(transfer_id, ...) → on_piece(piece)* → await reception.committed() → reception.close()

Ownership: `send` takes over the tensor it is given; `on_piece` hands over the tensor it is called with (staging memory
that no transport touches again). Nobody remote ever writes into a KV pool.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from common.identity import Ticket


@dataclass(frozen=True)
class Destination:
    """Where a decode worker receives KV, and which incarnation of it is meant."""

    address: str  # host:port
    incarnation: str
    transport: str


@dataclass(frozen=True)
class KVPiece:
    """Layers [layer_start, layer_start + data.shape[0]) of tokens [token_start, token_start + data.shape[2]).

    data: contiguous [layers, 2 (K, V), tokens, num_kv_heads, head_dim] in the layout's dtype.
    """

    layer_start: int
    token_start: int
    data: Tensor

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

    def as_counters(self) -> dict[str, int]:
        """Flat, by the names that docs/architecture.md lists."""
        return {
            "kv_transfers_committed": self.transfers_committed,
            "kv_transfers_failed": self.transfers_failed,
            "kv_pieces": self.pieces,
            "kv_bytes": self.bytes,
            "kv_stale_pieces": self.stale_pieces,
            "kv_pieces_rejected": sum(self.pieces_rejected.values()),
        }


class OutgoingTransfer(Protocol):
    """One attempt at one transfer, on the source. Ends with commit or abort, whichever comes first."""

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

    def expect(
        self, transfer_id: bytes, num_tokens: int, skip_tokens: int, on_piece: Callable[[KVPiece], None]
    ) -> Reception:
        """Accept pieces for this transfer. `on_piece` is called on the event loop with each verified piece, whose
        data it may keep; a later attempt starts over and its pieces overwrite the earlier one's.

        Raises: InvalidRequest when the id is already expected.
        """

    async def close(self) -> None:
        """End every reception and link. Safe to call twice."""
