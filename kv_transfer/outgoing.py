"""One attempt at one transfer on the source, and the frames that it queues on its link."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from common.errors import TransferAborted, TransferError, TransferTimeout
from common.identity import Ticket
from kv_transfer.transport import KVPiece, TransferReceipt, TransferStats
from kv_transfer.wire import MAX_PIECE_BYTES, PieceHeader

if TYPE_CHECKING:
    from kv_transfer.link_source import SourceLink


class LinkedTransfer:
    """One attempt on a link; the OutgoingTransfer of every kind. All but `send` belong to the event loop."""

    def __init__(self, ticket: Ticket, link: SourceLink, stats: TransferStats) -> None:
        self.ticket = ticket
        self.stats = stats
        self.headers: list[PieceHeader] = []  # what was written, for the commit
        self._link = link
        self._is_over = asyncio.Event()
        self._error: TransferError | None = None

    @property
    def is_over(self) -> bool:
        return self._is_over.is_set()

    @property
    def has_room(self) -> bool:
        """Also once the link is dead: what is sent then goes nowhere, and `commit` says why."""
        return self._link.backlog.has_room or not self._link.is_alive

    @property
    def piece_bytes(self) -> int:
        return self._link.piece_bytes

    def send(self, piece: KVPiece) -> None:
        piece = replace(piece, data=self._link.shared_heads(piece.data))
        assert 0 < piece.num_bytes <= MAX_PIECE_BYTES, "plan.py cuts pieces to fit"
        self._link.backlog.add(piece.num_bytes)
        self._link.frames.put(PieceFrame(self, piece, _computed(piece.data)))

    async def commit(self, first_token: int, timeout_s: float) -> TransferReceipt:
        self._link.frames.put(CommitFrame(self, first_token))
        try:
            while not self.is_over:
                await self._wait_while_link_moves(timeout_s)
        except asyncio.CancelledError:
            self.abort()
            raise
        if self._error is not None:
            raise self._error
        return TransferReceipt(len(self.headers), sum(header.num_bytes for header in self.headers))

    async def _wait_while_link_moves(self, timeout_s: float) -> None:
        """A slow link is no lost one, and what others have queued on it is not this transfer's fault."""
        progress = self._link.progress
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_over.wait()
        except TimeoutError:
            if self._link.progress == progress:
                self.fail(TransferTimeout(f"nothing has moved on the KV link to {self._link.peer} for {timeout_s} s"))

    def abort(self) -> None:
        self.fail(TransferAborted("the source aborted the transfer"))

    def succeed(self) -> None:
        if not self.is_over:
            self.stats.transfers_committed += 1
            self._end()

    def fail(self, error: TransferError) -> None:
        """End with this error, unless it has ended already. The destination is told, in case it still waits."""
        if self.is_over:
            return
        self._error = error
        if not isinstance(error, TransferAborted):
            self.stats.transfers_failed += 1
        self._end()
        self._link.frames.put(AbortFrame(self.ticket))

    def _end(self) -> None:
        self._is_over.set()
        self._link.forget(self)


@dataclass(frozen=True)
class PieceFrame:
    transfer: LinkedTransfer
    piece: KVPiece
    computed: torch.cuda.Event | None


@dataclass(frozen=True)
class CommitFrame:
    transfer: LinkedTransfer
    first_token: int


@dataclass(frozen=True)
class AbortFrame:
    ticket: Ticket


Frame = PieceFrame | CommitFrame | AbortFrame


def _computed(data: Tensor) -> torch.cuda.Event | None:
    """An event on the caller's stream after which a CUDA tensor may be read from any other stream."""
    if not data.is_cuda:
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(data.device))
    return event
