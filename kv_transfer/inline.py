"""Payloads that ride inside the piece message: nothing to connect, nothing to lose."""

from __future__ import annotations

import asyncio

import torch
from torch import Tensor

from common.pb import kv_transfer_pb2 as pb
from kv_transfer.link import PackedPayload, ReceivedPayload, Rendezvous
from kv_transfer.wire import PieceHeader, buffer_of, checksum_of


class InlineSource:
    """Hashing and copying take some 25 µs per 256 KB, less than handing the piece to a thread would."""

    async def connect(self, rendezvous: Rendezvous) -> None:
        pass

    async def pack(self, flat: Tensor) -> PackedPayload:
        if flat.is_cuda:
            flat = await asyncio.to_thread(flat.cpu)
        return PackedPayload(checksum_of(flat), bytes(buffer_of(flat)))

    async def push(self, flat: Tensor) -> None:
        pass

    async def close(self) -> None:
        pass


class InlineDestination:
    """Hands over CPU memory of its own: the message's bytes are read-only and of any alignment."""

    async def prepare(self, host: str) -> Rendezvous:
        return Rendezvous()

    async def connect(self) -> None:
        pass

    async def receive(self, header: PieceHeader, message: pb.Piece) -> ReceivedPayload:
        payload = message.payload
        flat = torch.empty(len(payload), dtype=torch.uint8)
        buffer_of(flat)[:] = payload
        return ReceivedPayload(flat, checksum_of(flat))

    async def close(self) -> None:
        pass
