"""The wire format as pure functions: piece headers, checksums, the manifest of a commit, tensors to bytes and back."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from common.identity import Ticket
from common.kv_layout import KVLayout
from common.pb import kv_transfer_pb2 as pb
from common.rpc import MAX_MESSAGE_BYTES
from kv_transfer.checksum import CHECKSUM
from kv_transfer.transport import KVPiece

PROTOCOL_VERSION = 1
MAX_PIECE_BYTES = MAX_MESSAGE_BYTES // 2  # a piece is one message; plan.py stays far below

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
    checksum: int

    @property
    def area(self) -> int:
        """In token-layers, the unit of coverage."""
        return (self.layer_end - self.layer_start) * (self.token_end - self.token_start)

    def to_pb(self, payload: bytes = b"") -> pb.Piece:
        return pb.Piece(
            ticket=self.ticket.to_pb(),
            layer_start=self.layer_start,
            layer_end=self.layer_end,
            token_start=self.token_start,
            token_end=self.token_end,
            checksum=self.checksum,
            num_bytes=self.num_bytes,
            payload=payload,
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

    @staticmethod
    def of(headers: Iterable[PieceHeader]) -> Manifest:
        ordered = sorted(headers, key=lambda header: (header.layer_start, header.token_start))
        checksums = struct.pack(f"<{len(ordered)}Q", *(header.checksum for header in ordered))
        return Manifest(len(ordered), sum(header.num_bytes for header in ordered), CHECKSUM.of(checksums))


def describe(ticket: Ticket, piece: KVPiece, checksum: int) -> PieceHeader:
    return PieceHeader(
        ticket,
        piece.layer_start,
        piece.layer_start + piece.num_layers,
        piece.token_start,
        piece.token_start + piece.num_tokens,
        piece.num_bytes,
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


def to_piece(header: PieceHeader, flat: Tensor, layout: KVLayout) -> KVPiece:
    """A verified payload ([num_bytes] uint8, on any device) as the tensor it was; shares its memory."""
    shape = (
        header.layer_end - header.layer_start,
        2,
        header.token_end - header.token_start,
        layout.num_kv_heads,
        layout.head_dim,
    )
    return KVPiece(header.layer_start, header.token_start, flat.view(_DTYPES[layout.dtype]).view(shape))
