"""KV senders that are real in everything but one fault: what they send is wrong, or never ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from common.errors import PeerLost, TransferError
from common.identity import Ticket
from common.kv_layout import KVLayout
from common.transfer_config import TransferConfig
from kv_transfer.factory import make_sender
from kv_transfer.transport import (
    Destination,
    KVPiece,
    KVSender,
    LinkReport,
    OutgoingTransfer,
    TransferReceipt,
    TransferStats,
)
from prefill_worker.server import SenderFactory

Spoil = Callable[[KVPiece], Tensor]  # a piece → the data to send in its place


class FaultySender:
    """`spoil` changes every piece. The first `num_stuck` commits never end, the next `num_failing` fail."""

    def __init__(self, inner: KVSender, spoil: Spoil, num_stuck: int, num_failing: int) -> None:
        self._inner = inner
        self.stats: TransferStats = inner.stats
        self.on_room: Callable[[], None] = lambda: None
        self.spoil = spoil
        self.num_stuck = num_stuck
        self.num_failing = num_failing

    async def open(self, destination: Destination, ticket: Ticket) -> OutgoingTransfer:
        return FaultyTransfer(self, await self._inner.open(destination, ticket))

    def links(self) -> list[LinkReport]:
        return self._inner.links()

    async def close(self) -> None:
        await self._inner.close()


class FaultyTransfer:
    def __init__(self, sender: FaultySender, inner: OutgoingTransfer) -> None:
        self._sender = sender
        self._inner = inner

    @property
    def has_room(self) -> bool:
        return self._inner.has_room

    @property
    def piece_bytes(self) -> int:
        return self._inner.piece_bytes

    def send(self, piece: KVPiece) -> None:
        self._inner.send(replace(piece, data=self._sender.spoil(piece).contiguous()))

    async def commit(self, first_token: int, timeout_s: float) -> TransferReceipt:
        if self._sender.num_stuck:
            self._sender.num_stuck -= 1
            await asyncio.get_running_loop().create_future()
        if self._sender.num_failing:
            self._sender.num_failing -= 1
            self._inner.abort()
            raise _INJECTED
        return await self._inner.commit(first_token, timeout_s)

    def abort(self) -> None:
        self._inner.abort()


_INJECTED: TransferError = PeerLost("injected")


def faulty(spoil: Spoil = lambda piece: piece.data, *, num_stuck: int = 0, num_failing: int = 0) -> SenderFactory:
    def new_sender(config: TransferConfig, layout: KVLayout, incarnation: str, device: torch.device) -> KVSender:
        return FaultySender(make_sender(config, layout, incarnation, device), spoil, num_stuck, num_failing)

    return new_sender


# data: [layers, 2 (K, V), tokens, kv_heads, head_dim]


def swapped(piece: KVPiece) -> Tensor:
    return piece.data.flip(1)


def heads_permuted(piece: KVPiece) -> Tensor:
    return piece.data.flip(3)


def shifted_by_a_position(piece: KVPiece) -> Tensor:
    return piece.data.roll(1, dims=2)


def scaled(piece: KVPiece) -> Tensor:
    return piece.data * 1.01


def last_layer_negated(piece: KVPiece) -> Tensor:
    """Layer 3 of the tiny model, its V alone."""
    signs = torch.ones(piece.num_layers, 2, 1, 1, 1)
    if piece.layer_start + piece.num_layers == 4:
        signs[-1, 1] = -1
    return piece.data * signs
