"""One attempt as its destination sees it: which pieces are in, and whether the commit may be believed. No I/O."""

from __future__ import annotations

from enum import StrEnum

from common.errors import CorruptPiece
from common.identity import Ticket
from common.kv_layout import KVLayout
from kv_transfer.coverage import Box, Coverage
from kv_transfer.wire import Manifest, PieceHeader


class Reason(StrEnum):
    """Why a piece or a commit was refused; the keys of TransferStats.pieces_rejected."""

    IDENTITY = "identity"  # another transfer, attempt, process, or number of tokens
    RANGE = "range"  # outside the layers × tokens that are to be sent, or empty
    SIZE = "size"  # not the bytes that its range takes
    CHECKSUM = "checksum"
    OVERLAP = "overlap"  # doubled, or shifted onto another piece
    INCOMPLETE = "incomplete"  # the commit came, some layers or tokens did not
    MANIFEST = "manifest"  # the commit speaks of other pieces than those that came


class PieceRefused(CorruptPiece):
    """Crosses the wire as CorruptPiece."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Assembly:
    """Collects the pieces of `ticket` until they tile layers × [skip_tokens, num_tokens) exactly, in any order.

    After a refusal the attempt is void; the owner drops the assembly.
    """

    def __init__(self, ticket: Ticket, layout: KVLayout) -> None:
        self.ticket = ticket
        self._layout = layout
        self._headers: list[PieceHeader] = []
        self._coverage = Coverage(
            Box(0, layout.num_layers, ticket.skip_tokens, ticket.num_tokens, 0, layout.num_kv_heads)
        )

    def accept(self, header: PieceHeader, num_bytes: int, checksum: int) -> None:
        """Take in a piece whose payload, as received, has this size and checksum.

        Raises: PieceRefused.
        """
        self._require_identity(header.ticket)
        self._require_range(header)
        self._require_payload(header, num_bytes, checksum)
        if not self._coverage.claim(self._box(header)):
            raise PieceRefused(Reason.OVERLAP, f"{_where(header)} overlaps a piece that is already in")
        self._headers.append(header)

    def verify(self, ticket: Ticket, manifest: Manifest) -> Manifest:
        """The commit's last word: everything is in, and it is what the source sent. Returns what is in.

        Raises: PieceRefused.
        """
        self._require_identity(ticket)
        if not self._coverage.is_complete:
            volumes = f"{self._coverage.covered} of {self._coverage.bounds.volume}"
            raise PieceRefused(Reason.INCOMPLETE, f"{volumes} layers × tokens × heads arrived before the commit")
        received = Manifest.of(self._headers)
        if received != manifest:
            raise PieceRefused(Reason.MANIFEST, f"the commit names {manifest}, received were {received}")
        return received

    def _require_identity(self, ticket: Ticket) -> None:
        if ticket != self.ticket:
            raise PieceRefused(Reason.IDENTITY, f"expected {self.ticket}, not {ticket}")

    def _require_range(self, header: PieceHeader) -> None:
        if not self._coverage.bounds.holds(self._box(header)):
            raise PieceRefused(
                Reason.RANGE,
                f"{_where(header)} is not within layers [0, {self._layout.num_layers}) "
                f"and tokens [{self.ticket.skip_tokens}, {self.ticket.num_tokens})",
            )

    def _require_payload(self, header: PieceHeader, num_bytes: int, checksum: int) -> None:
        expected = header.area * self._layout.token_layer_bytes
        if not expected == header.num_bytes == num_bytes:
            raise PieceRefused(
                Reason.SIZE, f"{_where(header)} takes {expected} bytes, announced {header.num_bytes}, got {num_bytes}"
            )
        if header.checksum != checksum:
            raise PieceRefused(
                Reason.CHECKSUM, f"{_where(header)} was sent with checksum {header.checksum:016x}, got {checksum:016x}"
            )

    def _box(self, header: PieceHeader) -> Box:
        """A piece holds all KV heads."""
        layers, tokens = (header.layer_start, header.layer_end), (header.token_start, header.token_end)
        return Box(*layers, *tokens, 0, self._layout.num_kv_heads)


def _where(header: PieceHeader) -> str:
    return (
        f"the piece for layers [{header.layer_start}, {header.layer_end}) "
        f"and tokens [{header.token_start}, {header.token_end})"
    )
