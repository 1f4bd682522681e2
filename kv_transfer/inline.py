"""Payloads that ride inside the piece message: nothing to connect, nothing to lose."""

from __future__ import annotations

import asyncio

from torch import Tensor

from common.pb import kv_transfer_pb2 as pb
from kv_transfer.link import Landing, PackedPayload, ReceivedPayload
from kv_transfer.side_stream import copy_to_host
from kv_transfer.stream_channel import NextRequest, WriteRequest
from kv_transfer.wire import PieceHeader, buffer_of, checksum_of


class InlineSource:
    """Hashing and copying take some 25 µs per 256 KB, less than handing the piece to a thread would."""

    name = "inline"

    async def attach(self, welcome: pb.LinkWelcome, write: WriteRequest) -> None:
        pass

    async def pack(self, flat: Tensor) -> PackedPayload:
        return await pack_on_host(flat)

    async def put(self, piece: pb.Piece, flat: Tensor) -> None:
        piece.payload = bytes(buffer_of(flat))

    async def push(self, flat: Tensor) -> None:
        pass

    def on_credit(self, num_bytes: int) -> None:
        pass

    async def close(self) -> None:
        pass


class InlineDestination:
    name = "inline"
    max_ahead = 1

    async def prepare(self, welcome: pb.LinkWelcome, landing: Landing) -> None:
        self._landing = landing

    async def attach(self, read: NextRequest) -> None:
        pass

    async def receive(self, header: PieceHeader, piece: pb.Piece) -> ReceivedPayload:
        """What the message really brings, whatever its header announces."""
        payload = piece.payload
        staged = self._landing.staging.take(len(payload))
        buffer_of(staged.flat)[:] = payload
        return ReceivedPayload(staged, checksum_of(staged.flat))

    async def close(self) -> None:
        pass


async def pack_on_host(flat: Tensor) -> PackedPayload:
    on_host = await to_host(flat)
    return PackedPayload(on_host, checksum_of(on_host))


async def to_host(flat: Tensor) -> Tensor:
    """For every channel that moves host memory."""
    return await asyncio.to_thread(copy_to_host, flat) if flat.is_cuda else flat
