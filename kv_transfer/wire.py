"""The wire format as pure functions: piece headers, checksums, the manifest of a commit, tensors to bytes and back."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from common.identity import TRANSFER_ID_BYTES, Ticket
from common.pb import kv_transfer_pb2 as pb
from kv_transfer.checksum import CHECKSUM
from kv_transfer.transport import KVPiece

PROTOCOL_VERSION = 3
OLDEST_PROTOCOL_VERSION = 1  # without proof and credit, and its commits leave the first token unguarded
LATE_CHECKSUM_VERSION = 3  # a commit does not need the pieces' checksums, so a channel may take them as pieces leave
MAX_PIECE_BYTES = 8 * 1024 * 1024  # what a peer may announce; plan.py stays below

PROBE_ID = b"\xff" * TRANSFER_ID_BYTES  # measures a link; no transfer of anybody's


@dataclass(frozen=True)
class PieceHeader:
    """Where a piece belongs and what its payload must be: layers [layer_start, layer_end) × tokens [token_start,
    token_end) of one attempt."""

    ticket: Ticket
    layer_start: int
    layer_end: int
    token_start: int
    token_end: int
    num_bytes: int
    checksum: int  # 0 at a source whose channel takes it as the piece leaves

    @property
    def area(self) -> int:
        """In token-layers, the unit of coverage."""
        return (self.layer_end - self.layer_start) * (self.token_end - self.token_start)

    @property
    def sealed_range(self) -> bytes:
        return struct.pack("<4I", self.layer_start, self.layer_end, self.token_start, self.token_end)

    def to_pb(self) -> pb.Piece:
        return pb.Piece(
            ticket=self.ticket.to_pb(),
            layer_start=self.layer_start,
            layer_end=self.layer_end,
            token_start=self.token_start,
            token_end=self.token_end,
            checksum=self.checksum,
            num_bytes=self.num_bytes,
        )

    @staticmethod
    def from_pb(message: pb.Piece) -> PieceHeader:
        """Raises: InvalidRequest when the ticket is malformed."""
        return PieceHeader(
            Ticket.from_pb(message.ticket),
            message.layer_start,
            message.layer_end,
            message.token_start,
            message.token_end,
            message.num_bytes,
            message.checksum,
        )


@dataclass(frozen=True)
class Manifest:
    """What a commit says was sent; both ends compute it from the headers, in whatever order those came."""

    num_pieces: int
    num_bytes: int
    checksum: int
    first_token: int
    version: int  # what both ends speak; it decides what the checksum covers

    @staticmethod
    def of(headers: Iterable[PieceHeader], first_token: int, version: int = PROTOCOL_VERSION) -> Manifest:
        ordered = sorted(headers, key=lambda header: (header.layer_start, header.token_start))
        if version >= LATE_CHECKSUM_VERSION:
            sealed = b"".join(header.sealed_range for header in ordered)
        else:
            sealed = struct.pack(f"<{len(ordered)}Q", *(header.checksum for header in ordered))
        if version >= 2:
            sealed += struct.pack("<I", first_token)
        num_bytes = sum(header.num_bytes for header in ordered)
        return Manifest(len(ordered), num_bytes, CHECKSUM.of(sealed), first_token, version)


def describe(ticket: Ticket, piece: KVPiece, num_bytes: int, checksum: int) -> PieceHeader:
    return PieceHeader(
        ticket,
        piece.layer_start,
        piece.layer_start + piece.num_layers,
        piece.token_start,
        piece.token_start + piece.num_tokens,
        num_bytes,
        checksum,
    )


def flat_bytes(data: Tensor) -> Tensor:
    """A contiguous tensor as [num_bytes] uint8 sharing its memory: bfloat16 has no buffer format of its own."""
    return data.view(-1).view(torch.uint8)


def buffer_of(flat: Tensor) -> memoryview:
    """The memory of a CPU [num_bytes] uint8 tensor, not a copy of it."""
    return flat.numpy().data


def checksum_of(flat: Tensor) -> int:
    """CHECKSUM of a CPU [num_bytes] uint8 tensor."""
    return CHECKSUM.of(buffer_of(flat))
