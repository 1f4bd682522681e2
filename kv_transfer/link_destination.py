"""The destination's side of a link: each frame to the transfer that it names, and what to answer."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from common.errors import CorruptPiece, InvalidRequest, TransferAborted, TransferError
from common.identity import Ticket
from common.pb import kv_transfer_pb2 as pb
from kv_transfer.assembly import PieceRefused, Reason
from kv_transfer.codec import PieceCodec
from kv_transfer.handshake import Agreement
from kv_transfer.link import Arrival, ReceivedPayload
from kv_transfer.reception import ExpectedTransfer
from kv_transfer.transport import TransferStats
from kv_transfer.wire import PROBE_ID, Manifest, PieceHeader

logger = logging.getLogger(__name__)

NOT_AWAITED = "the destination does not wait for this attempt"


class DestinationLink:
    """After the handshake. `expected` is the receiver's own table: it changes while the link lives."""

    def __init__(
        self,
        agreement: Agreement,
        codec: PieceCodec,
        expected: Mapping[bytes, ExpectedTransfer],
        stats: TransferStats,
    ) -> None:
        self.num_bytes = 0  # of payload that was accepted
        self._agreement = agreement
        self._codec = codec
        self._expected = expected
        self._stats = stats
        self._stopped: set[Ticket] = set()  # attempts whose source has been told to stop and has not answered yet

    def handle(self, arrival: Arrival) -> pb.LinkReply | None:
        """What to answer. Raises: InvalidRequest on a malformed frame; the link ends."""
        request = arrival.request
        match request.WhichOneof("frame"):
            case "piece":
                assert arrival.payload is not None, "channels hand pieces over with their payload"
                return self._on_piece(request.piece, arrival.payload)
            case "commit":
                return self._on_commit(request.commit)
            case "abort":
                self._on_abort(Ticket.from_pb(request.abort.ticket))
                return None
        raise InvalidRequest(f"unexpected frame {request.WhichOneof('frame')} on a KV link")

    def drop(self) -> None:
        """The link is gone: its unfinished attempts are void, their receptions wait for the next one."""
        for reception in list(self._expected.values()):
            if reception.drop_link(self._codec):
                self._stats.transfers_failed += 1

    def _on_piece(self, piece: pb.Piece, payload: ReceivedPayload) -> pb.LinkReply | None:
        """Whatever does not end in an accepted piece gives the staging memory back here."""
        is_accepted = False
        try:
            header = PieceHeader.from_pb(piece)
            is_accepted = self._accept(header, payload)
        except PieceRefused as refused:
            return self._refuse(header.ticket, refused)
        finally:
            if not is_accepted:
                payload.staged.release()
        if is_accepted:
            self._stats.pieces += 1
            self._stats.bytes += header.num_bytes
            self.num_bytes += header.num_bytes
            return None
        if header.ticket.transfer_id == PROBE_ID:
            return None
        self._stats.stale_pieces += 1
        return self._stop(header.ticket)

    def _accept(self, header: PieceHeader, payload: ReceivedPayload) -> bool:
        ticket = header.ticket
        if not self._is_of_this_link(ticket):
            raise self._foreign(ticket)
        reception = self._expected.get(ticket.transfer_id)
        return reception is not None and reception.accept(self._codec, header, payload)

    def _on_commit(self, message: pb.Commit) -> pb.LinkReply:
        ticket = Ticket.from_pb(message.ticket)
        manifest = Manifest(
            message.num_pieces, message.num_bytes, message.checksum, message.first_token, self._agreement.version
        )
        if not self._is_of_this_link(ticket):
            return self._refuse(ticket, self._foreign(ticket))
        if ticket.transfer_id == PROBE_ID:
            return _verdict(ticket, None)
        self._stopped.discard(ticket)
        reception = self._expected.get(ticket.transfer_id)
        was_committed = reception is not None and reception.is_committed
        try:
            is_accepted = reception is not None and reception.commit(self._codec, ticket, manifest)
        except PieceRefused as refused:
            return self._refuse(ticket, refused)
        if not is_accepted:
            return _verdict(ticket, TransferAborted(NOT_AWAITED))
        assert reception is not None
        self._stats.transfers_committed += reception.is_committed and not was_committed
        return _verdict(ticket, None)

    def _on_abort(self, ticket: Ticket) -> None:
        self._stopped.discard(ticket)
        reception = self._expected.get(ticket.transfer_id)
        if reception is not None:
            reception.abort(self._codec, ticket)

    def _is_of_this_link(self, ticket: Ticket) -> bool:
        ends = (self._agreement.source_incarnation, self._agreement.destination_incarnation)
        return (ticket.source_incarnation, ticket.destination_incarnation) == ends

    def _foreign(self, ticket: Ticket) -> PieceRefused:
        source, destination = self._agreement.source_incarnation, self._agreement.destination_incarnation
        return PieceRefused(Reason.IDENTITY, f"the link joins {source} and {destination}, not the two ends of {ticket}")

    def _refuse(self, ticket: Ticket, refused: PieceRefused) -> pb.LinkReply:
        """The verdict does not wait for the commit: the source stops sending at once."""
        logger.warning("transfer %s attempt %d refused: %s", ticket.transfer_id.hex(), ticket.attempt, refused)
        rejected = self._stats.pieces_rejected
        rejected[refused.reason] = rejected.get(refused.reason, 0) + 1
        if self._is_of_this_link(ticket):  # nobody would answer for another one
            self._stats.transfers_failed += 1
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
