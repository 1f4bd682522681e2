"""One expected transfer on the destination: which attempt it listens to, and when it is complete.

no attempt ──piece or commit──▶ assembling ──every part's commit verified──▶ committed (the end; later frames are stale)
    ▲                               │
    └── attempt void: corrupt, aborted, a link of it lost ──┘    a higher attempt starts over from any of these

A part is what one link brings: all KV heads of the destination, or, from one of several tensor-parallel sources, those
that both have.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from common.errors import TransferAborted
from common.identity import Ticket
from kv_transfer.assembly import Assembly, PieceRefused
from kv_transfer.codec import PieceCodec
from kv_transfer.link import ReceivedPayload
from kv_transfer.transport import Committed, OnPiece, TransferReceipt
from kv_transfer.wire import Manifest, PieceHeader


@dataclass
class _Part:
    codec: PieceCodec
    assembly: Assembly
    received: Manifest | None = None  # once its commit is verified


class ExpectedTransfer:
    """The Reception of every kind. A link is known by its `PieceCodec`, one object for each."""

    def __init__(
        self,
        expected: Callable[[int, str], Ticket],
        num_heads: int,
        on_piece: OnPiece,
        on_close: Callable[[], object],
    ) -> None:
        """expected: the only ticket acceptable for (attempt, source incarnation). num_heads: the destination's."""
        self._expected = expected
        self._num_heads = num_heads
        self._on_piece = on_piece
        self._on_close = on_close
        self._last_attempt = 0
        self._is_void = False  # the last attempt: nothing more of it counts
        self._parts: list[_Part] = []  # of the last attempt
        self._committed: Committed | None = None
        self._is_settled = asyncio.Event()
        self._is_closed = False

    @property
    def is_committed(self) -> bool:
        return self._committed is not None

    async def committed(self) -> Committed:
        await self._is_settled.wait()
        if self._committed is None:
            raise TransferAborted("the destination no longer waits for this transfer")
        return self._committed

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._parts = []
            self._on_close()
            self._is_settled.set()

    def accept(self, link: PieceCodec, header: PieceHeader, payload: ReceivedPayload) -> bool:
        """Take in a piece and hand it on; False if it is stale, and the payload stays the caller's.

        Raises: PieceRefused, and the attempt is void; the payload stays the caller's.
        """
        part = self._part_of(link, header.ticket)
        if part is None or part.received is not None:
            return False
        try:
            part.assembly.accept(header, payload.staged.flat.numel(), payload.checksum)
        except PieceRefused:
            self._is_void = True
            raise
        self._on_piece(link.decode(header, payload.staged.flat), payload.staged.release)
        return True

    def commit(self, link: PieceCodec, ticket: Ticket, manifest: Manifest) -> bool:
        """Verify, and settle once all heads are in; False if the commit is stale. A repeated one is confirmed again.

        Raises: PieceRefused, and the attempt is void.
        """
        if self._committed is not None:
            return ticket == self._committed.ticket
        part = self._part_of(link, ticket)
        if part is None:
            return False
        if part.received is None:
            try:
                part.received = part.assembly.verify(ticket, manifest)
            except PieceRefused:
                self._is_void = True
                raise
        self._settle_if_complete(ticket, manifest.first_token)
        return True

    def abort(self, link: PieceCodec, ticket: Ticket) -> None:
        """The source gave this attempt up; the next one may begin."""
        if self._committed is None and ticket.attempt == self._last_attempt and self._has_part_of(link):
            self._is_void = True

    def drop_link(self, link: PieceCodec) -> bool:
        """The link is gone, and with it an attempt that was under way on it: True."""
        is_under_way = self._committed is None and not self._is_void and self._has_part_of(link)
        if is_under_way:
            self._is_void = True
        return is_under_way

    def _part_of(self, link: PieceCodec, ticket: Ticket) -> _Part | None:
        """Where this ticket's frames on this link belong; None if they are stale."""
        if self._committed is not None or ticket.attempt < self._last_attempt:
            return None
        if ticket.attempt > self._last_attempt:
            self._last_attempt, self._is_void, self._parts = ticket.attempt, False, []
        if self._is_void:
            return None
        for part in self._parts:
            if part.codec is link:
                return part
        if any(part.codec.heads.overlap(link.heads) for part in self._parts):
            return None  # another link brings these heads
        expected = self._expected(ticket.attempt, ticket.source_incarnation)
        part = _Part(link, Assembly(expected, link.layout.num_layers, link.num_bytes))
        self._parts.append(part)
        return part

    def _has_part_of(self, link: PieceCodec) -> bool:
        return any(part.codec is link for part in self._parts)

    def _settle_if_complete(self, ticket: Ticket, first_token: int) -> None:
        received = [part.received for part in self._parts if part.received is not None]
        num_heads = sum(len(part.codec.heads) for part in self._parts if part.received is not None)
        if num_heads == self._num_heads:  # parts never overlap
            receipt = TransferReceipt(
                sum(manifest.num_pieces for manifest in received), sum(manifest.num_bytes for manifest in received)
            )
            self._committed = Committed(ticket, first_token, receipt)
            self._is_settled.set()
