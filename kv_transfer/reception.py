"""One expected transfer on the destination: which attempt it listens to, and when it is complete.

no attempt ──piece or commit──▶ assembling ──verified commit──▶ committed (the end; every later frame is stale)
    ▲                               │
    └── attempt void: corrupt, aborted, its link lost ──┘       a higher attempt starts over from any of these
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from common.errors import TransferAborted
from common.identity import Ticket
from common.kv_layout import KVLayout
from kv_transfer.assembly import Assembly, PieceRefused
from kv_transfer.link import ReceivedPayload
from kv_transfer.transport import Committed, KVPiece, TransferReceipt
from kv_transfer.wire import Manifest, PieceHeader, to_piece


class ExpectedTransfer:
    """The Reception of every kind. `link` below is whatever tells one link from another."""

    def __init__(
        self,
        expected: Callable[[int, str], Ticket],
        layout: KVLayout,
        on_piece: Callable[[KVPiece], None],
        on_close: Callable[[], object],
    ) -> None:
        """expected: the only ticket acceptable for (attempt, source incarnation)."""
        self._expected = expected
        self._layout = layout
        self._on_piece = on_piece
        self._on_close = on_close
        self._last_attempt = 0
        self._assembly: Assembly | None = None
        self._link: object = None  # where the current assembly's pieces come from
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
            self._assembly = None
            self._on_close()
            self._is_settled.set()

    def accept(self, link: object, header: PieceHeader, payload: ReceivedPayload) -> bool:
        """Take in a piece and hand it on; False if it is stale. Raises: PieceRefused, and the attempt is void."""
        assembly = self._listen_to(link, header.ticket)
        if assembly is None:
            return False
        try:
            assembly.accept(header, payload.flat.numel(), payload.checksum)
        except PieceRefused:
            self._assembly = None
            raise
        self._on_piece(to_piece(header, payload.flat, self._layout))
        return True

    def commit(self, link: object, ticket: Ticket, manifest: Manifest, first_token: int) -> bool:
        """Verify and settle; False if the commit is stale. A repeated commit is confirmed again.

        Raises: PieceRefused, and the attempt is void.
        """
        if self._committed is not None:
            return ticket == self._committed.ticket
        assembly = self._listen_to(link, ticket)
        if assembly is None:
            return False
        self._assembly = None
        received = assembly.verify(ticket, manifest)
        self._committed = Committed(ticket, first_token, TransferReceipt(received.num_pieces, received.num_bytes))
        self._is_settled.set()
        return True

    def abort(self, link: object, ticket: Ticket) -> None:
        """The source gave this attempt up; the next one may begin."""
        if self._link is link and self._assembly is not None and self._assembly.ticket == ticket:
            self._assembly = None

    def drop_link(self, link: object) -> bool:
        """The link is gone, and with it an attempt that was under way on it: True."""
        is_under_way = self._link is link and self._assembly is not None
        if is_under_way:
            self._assembly = None
        return is_under_way

    def _listen_to(self, link: object, ticket: Ticket) -> Assembly | None:
        """The assembly that this ticket's frames belong to; None if they are stale."""
        if self._committed is not None or ticket.attempt < self._last_attempt:
            return None
        if ticket.attempt > self._last_attempt:
            self._last_attempt, self._link = ticket.attempt, link
            self._assembly = Assembly(self._expected(ticket.attempt, ticket.source_incarnation), self._layout)
        return self._assembly if self._link is link else None
