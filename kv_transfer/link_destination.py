"""The destination's side of a link: each frame to the transfer that it names, and what to answer."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from common.errors import CorruptPiece, InvalidRequest, TransferAborted, TransferError
from common.identity import Ticket
from common.pb import kv_transfer_pb2 as pb
from kv_transfer.assembly import PieceRefused, Reason
from kv_transfer.link import PayloadDestination
from kv_transfer.reception import ExpectedTransfer
from kv_transfer.transport import TransferStats
from kv_transfer.wire import Manifest, PieceHeader

logger = logging.getLogger(__name__)

NOT_AWAITED = "the destination does not wait for this attempt"


class DestinationLink:
    """After the handshake, which settled the incarnations of (source, destination).

    `expected` is the receiver's own table: it changes while the link lives.
    """

    def __init__(
        self,
        incarnations: tuple[str, str],
        expected: Mapping[bytes, ExpectedTransfer],
        payloads: PayloadDestination,
        stats: TransferStats,
    ) -> None:
        self._incarnations = incarnations
        self._expected = expected
        self._payloads = payloads
        self._stats = stats
        self._stopped: set[Ticket] = set()  # attempts whose source has been told to stop and has not answered yet

    async def handle(self, request: pb.LinkRequest) -> pb.LinkReply | None:
        """Raises: InvalidRequest on a malformed frame, PeerLost when payloads cannot go on; the link ends."""
        match request.WhichOneof("frame"):
            case "piece":
                return await self._on_piece(request.piece)
            case "commit":
                return self._on_commit(request.commit)
            case "abort":
                self._on_abort(Ticket.from_pb(request.abort.ticket))
                return None
        raise InvalidRequest(f"unexpected frame {request.WhichOneof('frame')} on a KV link")

    def drop(self) -> None:
        """The link is gone: its unfinished attempts are void, their receptions wait for the next one."""
        for reception in list(self._expected.values()):
            if reception.drop_link(self):
                self._stats.transfers_failed += 1

    async def _on_piece(self, message: pb.Piece) -> pb.LinkReply | None:
        header = PieceHeader.from_pb(message)
        ticket = header.ticket
        payload = await self._payloads.receive(header, message)
        if not self._is_of_this_link(ticket):
            return self._refuse(ticket, self._foreign(ticket))
        reception = self._expected.get(ticket.transfer_id)  # looked up now: it may have closed meanwhile
        try:
            is_accepted = reception is not None and reception.accept(self, header, payload)
        except PieceRefused as refused:
            self._stats.transfers_failed += 1
            return self._refuse(ticket, refused)
        if is_accepted:
            self._stats.pieces += 1
            self._stats.bytes += header.num_bytes
            return None
        self._stats.stale_pieces += 1
        return self._stop(ticket)

    def _on_commit(self, message: pb.Commit) -> pb.LinkReply:
        ticket = Ticket.from_pb(message.ticket)
        manifest = Manifest(message.num_pieces, message.num_bytes, message.checksum)
        if not self._is_of_this_link(ticket):
            return self._refuse(ticket, self._foreign(ticket))
        self._stopped.discard(ticket)
        reception = self._expected.get(ticket.transfer_id)
        was_committed = reception is not None and reception.is_committed
        try:
            is_accepted = reception is not None and reception.commit(self, ticket, manifest, message.first_token)
        except PieceRefused as refused:
            self._stats.transfers_failed += 1
            return self._refuse(ticket, refused)
        if not is_accepted:
            return _verdict(ticket, TransferAborted(NOT_AWAITED))
        self._stats.transfers_committed += not was_committed
        return _verdict(ticket, None)

    def _on_abort(self, ticket: Ticket) -> None:
        self._stopped.discard(ticket)
        reception = self._expected.get(ticket.transfer_id)
        if reception is not None:
            reception.abort(self, ticket)

    def _is_of_this_link(self, ticket: Ticket) -> bool:
        return (ticket.source_incarnation, ticket.destination_incarnation) == self._incarnations

    def _foreign(self, ticket: Ticket) -> PieceRefused:
        return PieceRefused(Reason.IDENTITY, f"the link joins {self._incarnations}, not the two ends of {ticket}")

    def _refuse(self, ticket: Ticket, refused: PieceRefused) -> pb.LinkReply:
        """The verdict does not wait for the commit: the source stops sending at once."""
        logger.warning("transfer %s attempt %d refused: %s", ticket.transfer_id.hex(), ticket.attempt, refused)
        rejected = self._stats.pieces_rejected
        rejected[refused.reason] = rejected.get(refused.reason, 0) + 1
        if self._is_of_this_link(ticket):  # nobody would answer for another one
            self._stopped.add(ticket)
        return _verdict(ticket, refused)

    def _stop(self, ticket: Ticket) -> pb.LinkReply | None:
        """Tell the source once."""
        if ticket in self._stopped:
            return None
        self._stopped.add(ticket)
        return pb.LinkReply(ended=pb.TransferEnded(ticket=ticket.to_pb(), reason=NOT_AWAITED))


def _verdict(ticket: Ticket, error: TransferError | None) -> pb.LinkReply:
    result = pb.CommitResult(ticket=ticket.to_pb(), is_accepted=error is None)
    if error is not None:
        kind = CorruptPiece if isinstance(error, PieceRefused) else type(error)
        result.error_type, result.error = kind.__name__, error.message
    return pb.LinkReply(commit_result=result)
