"""The source's side of a link: transfers queue frames from any thread, one task writes them, one reads the verdicts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from common.errors import (
    CorruptPiece,
    InvalidRequest,
    PeerLost,
    ServingError,
    TransferAborted,
    TransferError,
)
from common.identity import Ticket
from common.pb import kv_transfer_pb2 as pb
from kv_transfer.credit import Backlog, Credit
from kv_transfer.frame_queue import FrameQueue
from kv_transfer.handshake import Agreement
from kv_transfer.heads import take_heads
from kv_transfer.link import Endpoint, SourceChannel, Way
from kv_transfer.outgoing import AbortFrame, CommitFrame, Frame, LinkedTransfer, PieceFrame
from kv_transfer.plan import MAX_AIM_BYTES, suitable_piece_bytes
from kv_transfer.probe import measure
from kv_transfer.side_stream import side_stream
from kv_transfer.staging import staged_bytes
from kv_transfer.transport import KVPiece, LinkSpeed, TransferStats
from kv_transfer.wire import PROBE_ID, Manifest, describe, flat_bytes
from kv_transfer.wire_dtype import ENCODINGS, WireDtype

logger = logging.getLogger(__name__)

_VERDICTS: dict[str, type[TransferError]] = {kind.__name__: kind for kind in (CorruptPiece, TransferAborted, PeerLost)}


# Waiting for one link; beyond it, prefill for that link pauses.
MAX_BACKLOG_BYTES = 64 * 1024 * 1024
MIN_BACKLOG_BYTES = 2 * 1024 * 1024
BACKLOG_S = 1.0
# Each after the one before. A link is new when its workers are, and then a small machine is busy with loading models.
MEASURE_AGAIN_AFTER_S = (3.0, 10.0, 30.0)


@dataclass(frozen=True)
class LinkContext:
    """What a link is told by the sender that owns it."""

    peer: str
    endpoint: Endpoint
    stats: TransferStats
    on_room: Callable[[], None]
    stall_timeout_s: float
    piece_bytes: int | None  # None: by the link's speed
    way: Way


class SourceLink:
    """One link, from the handshake on, until either end closes it or dies. Never comes back: the sender dials anew."""

    def __init__(self, channel: SourceChannel, agreement: Agreement, context: LinkContext) -> None:
        self.agreement = agreement
        self.transport = channel.wire_name
        self.speed: LinkSpeed | None = None  # until measured
        self.num_bytes = 0  # of payload, as it was sent
        self.progress = 0  # frames that have left or come; whoever waits for the link sees whether it moves
        self.frames: FrameQueue[Frame] = FrameQueue()
        self.backlog = Backlog(MAX_BACKLOG_BYTES, context.on_room)
        self._context = context
        self._is_measured = asyncio.Event()
        self._credit = Credit(agreement.credit_bytes, context.stall_timeout_s)
        self._channel = channel
        self._encoding = ENCODINGS[context.endpoint.wire_dtype]
        self._transfers: dict[Ticket, LinkedTransfer] = {}
        self._task = asyncio.create_task(self._run(), name=f"kv-link-to-{self.peer}")

    @property
    def peer(self) -> str:
        return self._context.peer

    @property
    def is_alive(self) -> bool:
        return not self.frames.is_closed

    @property
    def piece_bytes(self) -> int:
        if self._context.piece_bytes is not None:
            return self._context.piece_bytes
        way = self._context.way
        return min(suitable_piece_bytes(self.speed, way.piece_round_trips), way.max_piece_bytes or MAX_AIM_BYTES)

    def begin(self, ticket: Ticket, stats: TransferStats | None = None) -> LinkedTransfer:
        """stats: what counts it, by default the sender's.

        Raises: InvalidRequest if this attempt is under way, PeerLost if the link has died meanwhile.
        """
        if ticket in self._transfers:
            raise InvalidRequest(
                f"attempt {ticket.attempt} at transfer {ticket.transfer_id.hex()} is under way already"
            )
        if not self.is_alive:
            raise PeerLost(f"lost the KV link to {self.peer}")
        transfer = self._transfers[ticket] = LinkedTransfer(ticket, self, stats or self._context.stats)
        return transfer

    async def measure(self) -> None:
        """The best that was ever seen counts; what the link cannot send within BACKLOG_S is not queued on it.

        Raises: PeerLost, TransferTimeout, TransferAborted when the link is closed meanwhile.
        """
        now = await measure(self, self._context.endpoint.layout)
        best = self.speed or now
        self.speed = LinkSpeed(max(now.bytes_per_s, best.bytes_per_s), min(now.round_trip_s, best.round_trip_s))
        wanted_bytes = int(self.speed.bytes_per_s * BACKLOG_S)
        self.backlog.limit_bytes = min(max(MIN_BACKLOG_BYTES, wanted_bytes), MAX_BACKLOG_BYTES)
        self._is_measured.set()

    def forget(self, transfer: LinkedTransfer) -> None:
        del self._transfers[transfer.ticket]

    def shared_heads(self, data: Tensor) -> Tensor:
        """The heads of [layers, 2, tokens, source's heads, head_dim] that the destination holds too; contiguous."""
        return take_heads(data, self.agreement.source_heads, self.agreement.heads)

    async def close(self) -> None:
        """End every transfer with TransferAborted, then the link. Safe to call twice."""
        for transfer in list(self._transfers.values()):
            transfer.abort()
        self._task.cancel()
        await asyncio.wait([self._task])
        await self._release()  # a task cancelled before its first step has released nothing

    async def _run(self) -> None:
        loss = "it was closed"
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._write_frames())
                tasks.create_task(self._read_replies())
                tasks.create_task(self._measure_again())
        except* ServingError as lost:
            loss = str(lost.exceptions[0])
            logger.warning("lost the KV link to %s: %s", self.peer, loss)
        finally:  # whatever ended it, nobody waits on a dead link
            self.frames.close()
            for transfer in list(self._transfers.values()):
                transfer.fail(PeerLost(f"lost the KV link to {self.peer}: {loss}"))
            await self._release()
            self._context.on_room()  # whoever paused for this link goes on, and hears of its end

    async def _release(self) -> None:
        self.frames.close()
        await self._channel.close()

    async def _measure_again(self) -> None:
        await self._is_measured.wait()
        for wait_s in MEASURE_AGAIN_AFTER_S:
            await asyncio.sleep(wait_s)
            try:
                await self.measure()
            except TransferError as error:  # whatever it means for others, they hear of it themselves
                logger.info("the KV link to %s was not measured again: %s", self.peer, error.message)

    async def _write_frames(self) -> None:
        while True:
            await self._write(await self.frames.get())

    async def _write(self, frame: Frame) -> None:
        match frame:
            case PieceFrame(transfer, piece, computed):
                if not transfer.is_over:
                    await self._write_piece(transfer, piece, computed)
                self.backlog.remove(piece.num_bytes)
            case CommitFrame(transfer, first_token) if not transfer.is_over:
                await self._channel.write(pb.LinkRequest(commit=self._commit_of(transfer, first_token)))
            case AbortFrame(ticket):
                await self._channel.write(pb.LinkRequest(abort=pb.AbortTransfer(ticket=ticket.to_pb())))

    async def _write_piece(self, transfer: LinkedTransfer, piece: KVPiece, computed: torch.cuda.Event | None) -> None:
        if computed is not None:
            await asyncio.to_thread(computed.synchronize)
        packed = await self._channel.pack(await self._encode(piece.data))
        header = describe(transfer.ticket, piece, packed.flat.numel(), packed.checksum or 0)
        await self._credit.take(staged_bytes(header.num_bytes))
        if transfer.is_over:  # while there was no credit
            self._credit.give(staged_bytes(header.num_bytes))
            return
        await self._channel.write(pb.LinkRequest(piece=header.to_pb()), packed.flat)
        self.progress += 1
        transfer.headers.append(header)
        transfer.stats.pieces += 1
        transfer.stats.bytes += header.num_bytes
        if transfer.ticket.transfer_id != PROBE_ID:
            self.num_bytes += header.num_bytes

    def _commit_of(self, transfer: LinkedTransfer, first_token: int) -> pb.Commit:
        manifest = Manifest.of(transfer.headers, first_token, self.agreement.version)
        return pb.Commit(
            ticket=transfer.ticket.to_pb(),
            num_pieces=manifest.num_pieces,
            num_bytes=manifest.num_bytes,
            checksum=manifest.checksum,
            first_token=first_token,
        )

    async def _encode(self, data: Tensor) -> Tensor:
        if self._context.endpoint.wire_dtype is WireDtype.SAME:
            return flat_bytes(data)
        return await asyncio.to_thread(self._encode_now, data)

    def _encode_now(self, data: Tensor) -> Tensor:
        with side_stream(data):
            return self._encoding.encode(data)

    async def _read_replies(self) -> None:
        while True:
            reply = await self._channel.read()
            self.progress += 1
            match reply.WhichOneof("frame"):
                case "commit_result":
                    self._on_verdict(reply.commit_result)
                case "ended":
                    self._on_ended(reply.ended)
                case "credit":
                    self._credit.give(reply.credit.num_bytes)

    def _on_verdict(self, result: pb.CommitResult) -> None:
        transfer = self._transfers.get(Ticket.from_pb(result.ticket))
        if transfer is None:  # it timed out or was aborted meanwhile
            return
        if result.is_accepted:
            transfer.succeed()
        else:
            transfer.fail(_VERDICTS.get(result.error_type, TransferError)(result.error))

    def _on_ended(self, ended: pb.TransferEnded) -> None:
        transfer = self._transfers.get(Ticket.from_pb(ended.ticket))
        if transfer is not None:
            transfer.fail(TransferAborted(ended.reason))
