"""Every single bit of every frame that a source sends: flipped, it is noticed or it changes nothing."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import pytest
import torch
from google.protobuf.message import DecodeError

from common.errors import InvalidRequest
from common.identity import Ticket
from common.kv_layout import KVLayout
from common.pb import kv_transfer_pb2 as pb
from kv_transfer.codec import PieceCodec
from kv_transfer.handshake import Agreement
from kv_transfer.heads import HeadRange
from kv_transfer.link import Arrival, ReceivedPayload
from kv_transfer.link_destination import DestinationLink
from kv_transfer.reception import ExpectedTransfer
from kv_transfer.staging import StagingRing, ring_bytes
from kv_transfer.transport import KVPiece, Release, TransferStats
from kv_transfer.wire import PROTOCOL_VERSION, Manifest, PieceHeader, checksum_of, describe, flat_bytes
from kv_transfer.wire_dtype import WireDtype

LAYOUT = KVLayout("tiny", num_layers=2, num_kv_heads=1, head_dim=4, dtype="float32", rope="none")
HEADS = HeadRange(0, 1)
TICKET = Ticket(b"flipped-transfer", 1, "source", "destination", num_tokens=6, skip_tokens=2)
TRUTH = torch.arange(2 * 2 * 4 * 4, dtype=torch.float32).view(2, 2, 4, 1, 4) + 1
FIRST_TOKEN = 77


@dataclass
class Bench:
    """One link that brings one transfer, two tokens a piece."""

    landed: torch.Tensor = field(default_factory=lambda: torch.zeros_like(TRUTH))

    def __post_init__(self) -> None:
        agreement = Agreement("source", "destination", PROTOCOL_VERSION, HEADS, HEADS, HEADS, credit_bytes=1 << 20)
        codec = PieceCodec(LAYOUT, HEADS, HEADS, WireDtype.SAME)
        expected = {TICKET.transfer_id: ExpectedTransfer(_ticket, len(HEADS), self._on_piece, lambda: None)}
        self.reception = expected[TICKET.transfer_id]
        self.link = DestinationLink(agreement, codec, expected, TransferStats())
        self.ring = StagingRing(torch.empty(ring_bytes(1 << 12), dtype=torch.uint8), lambda num_bytes: None)

    def send(self, frame: pb.LinkRequest, payload: torch.Tensor | None) -> None:
        """Raises: InvalidRequest; the link ends."""
        if payload is None or not frame.HasField("piece"):
            if not frame.HasField("piece"):  # channels never hand over a piece without its payload
                self.link.handle(Arrival(frame))
            return
        staged = self.ring.take(payload.numel())
        staged.flat.copy_(payload)
        self.link.handle(Arrival(frame, ReceivedPayload(staged, checksum_of(staged.flat))))

    def _on_piece(self, piece: KVPiece, release: Release) -> None:
        start = piece.token_start - TICKET.skip_tokens
        layers = slice(piece.layer_start, piece.layer_start + piece.num_layers)
        self.landed[layers, :, start : start + piece.num_tokens] = piece.data
        release()


def _ticket(attempt: int, source: str) -> Ticket:
    return Ticket(TICKET.transfer_id, attempt, source, "destination", TICKET.num_tokens, TICKET.skip_tokens)


def frames() -> list[tuple[pb.LinkRequest, torch.Tensor | None]]:
    """The whole transfer in order; equal shapes, so that a piece would fit into another one's place."""
    headers: list[PieceHeader] = []
    sent: list[tuple[pb.LinkRequest, torch.Tensor | None]] = []
    for layer in range(2):
        for start in (0, 2):
            data = TRUTH[layer : layer + 1, :, start : start + 2].contiguous()
            flat = flat_bytes(data)
            piece = KVPiece(layer, TICKET.skip_tokens + start, data)
            headers.append(describe(TICKET, piece, flat.numel(), checksum_of(flat)))
            sent.append((pb.LinkRequest(piece=headers[-1].to_pb()), flat))
    manifest = Manifest.of(headers, FIRST_TOKEN)
    commit = pb.Commit(
        ticket=TICKET.to_pb(),
        num_pieces=manifest.num_pieces,
        num_bytes=manifest.num_bytes,
        checksum=manifest.checksum,
        first_token=FIRST_TOKEN,
    )
    return [*sent, (pb.LinkRequest(commit=commit), None)]


def deliver(number: int, bit: int) -> Bench:
    """The transfer with one bit of one frame flipped, as far as the link lives."""
    bench = Bench()
    for index, (frame, payload) in enumerate(frames()):
        raw = bytearray(frame.SerializeToString())
        if index == number:
            raw[bit // 8] ^= 1 << bit % 8
        try:
            bench.send(pb.LinkRequest.FromString(bytes(raw)), payload)
        except (DecodeError, InvalidRequest):
            break
    assert bench.ring.num_taken_bytes == 0
    return bench


async def test_what_is_not_flipped_is_committed() -> None:
    bench = deliver(-1, 0)
    assert bench.reception.is_committed
    assert torch.equal(bench.landed, TRUTH)


async def test_no_flipped_bit_commits_wrong_kv_or_a_wrong_first_token(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)  # each refusal is a warning
    num_noticed = 0
    for number, (frame, _) in enumerate(frames()):
        for bit in range(8 * len(frame.SerializeToString())):
            bench = deliver(number, bit)
            if not bench.reception.is_committed:
                num_noticed += 1
                continue
            committed = await bench.reception.committed()
            assert torch.equal(bench.landed, TRUTH), f"bit {bit} of frame {number}"
            assert committed.first_token == FIRST_TOKEN, f"bit {bit} of frame {number}"
    assert num_noticed > 1000
