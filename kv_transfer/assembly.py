"""One attempt as its destination sees it: which pieces are in, and whether the commit may be believed. No I/O."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from enum import StrEnum

from common.errors import CorruptPiece
from common.identity import Ticket
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

    def __init__(self, ticket: Ticket, num_layers: int, num_bytes: Callable[[PieceHeader], int]) -> None:
        """num_bytes: what a piece's range takes on the wire."""
        self.ticket = ticket
        self._num_layers = num_layers
        self._num_bytes = num_bytes
        self._headers: list[PieceHeader] = []
        self._covered: list[list[tuple[int, int]]] = [[] for _ in range(num_layers)]  # token ranges, sorted

    def accept(self, header: PieceHeader, num_bytes: int, checksum: int) -> None:
        """Take in a piece whose payload, as received, has this size and checksum.

        Raises: PieceRefused.
        """
        self._require_identity(header.ticket)
        self._require_range(header)
        self._require_payload(header, num_bytes, checksum)
        self._cover(header)
        self._headers.append(header)

    def verify(self, ticket: Ticket, manifest: Manifest) -> Manifest:
        """The commit's last word: everything is in, and it is what the source sent. Returns what is in.

        Raises: PieceRefused.
        """
        self._require_identity(ticket)
        expected = self._num_layers * (self.ticket.num_tokens - self.ticket.skip_tokens)
        covered = sum(header.area for header in self._headers)
        if covered != expected:  # pieces are in range and never overlap, so equal area is full coverage
            raise PieceRefused(Reason.INCOMPLETE, f"{covered} of {expected} token-layers arrived before the commit")
        received = Manifest.of(self._headers, manifest.first_token, manifest.version)
        if received != manifest:
            raise PieceRefused(Reason.MANIFEST, f"the commit names {manifest}, received were {received}")
        return received

    def _require_identity(self, ticket: Ticket) -> None:
        if ticket != self.ticket:
            raise PieceRefused(Reason.IDENTITY, f"expected {self.ticket}, not {ticket}")

    def _require_range(self, header: PieceHeader) -> None:
        has_layers = 0 <= header.layer_start < header.layer_end <= self._num_layers
        has_tokens = self.ticket.skip_tokens <= header.token_start < header.token_end <= self.ticket.num_tokens
        if not (has_layers and has_tokens):
            raise PieceRefused(
                Reason.RANGE,
                f"{_where(header)} is not within layers [0, {self._num_layers}) "
                f"and tokens [{self.ticket.skip_tokens}, {self.ticket.num_tokens})",
            )

    def _require_payload(self, header: PieceHeader, num_bytes: int, checksum: int) -> None:
        expected = self._num_bytes(header)
        if not expected == header.num_bytes == num_bytes:
            raise PieceRefused(
                Reason.SIZE, f"{_where(header)} takes {expected} bytes, announced {header.num_bytes}, got {num_bytes}"
            )
        if header.checksum != checksum:
            raise PieceRefused(
                Reason.CHECKSUM, f"{_where(header)} was sent with checksum {header.checksum:016x}, got {checksum:016x}"
            )

    def _cover(self, header: PieceHeader) -> None:
        span = (header.token_start, header.token_end)
        layers = self._covered[header.layer_start : header.layer_end]
        places = [bisect_left(ranges, span) for ranges in layers]
        for ranges, place in zip(layers, places, strict=True):
            runs_into_next = place < len(ranges) and ranges[place][0] < header.token_end
            runs_into_previous = place > 0 and ranges[place - 1][1] > header.token_start
            if runs_into_next or runs_into_previous:
                raise PieceRefused(Reason.OVERLAP, f"{_where(header)} overlaps a piece that is already in")
        for ranges, place in zip(layers, places, strict=True):
            ranges.insert(place, span)


def _where(header: PieceHeader) -> str:
    return (
        f"the piece for layers [{header.layer_start}, {header.layer_end}) "
        f"and tokens [{header.token_start}, {header.token_end})"
    )
