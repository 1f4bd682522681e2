"""A peer's process is killed in the middle of a transfer."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import torch

from common.errors import PeerLost
from common.transfer_config import TransferConfig
from kv_transfer.factory import make_sender
from kv_transfer.transport import Destination, KVPiece, Offer, Release
from kv_transfer.wire import PROTOCOL_VERSION
from tests.kv_transfer import peer
from tests.kv_transfer.wires import CPU, NewWire, new_layout, until

NETWORKED = ["grpc", "tcp", "shm", "torch_dist"]
NOTICED_S = 3.0


@asynccontextmanager
async def peer_process(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.kv_transfer.peer", *arguments, stdout=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def next_line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(30):
        return (await process.stdout.readline()).decode().strip()


@pytest.mark.parametrize("kind", NETWORKED)
async def test_a_source_notices_that_its_destination_was_killed(kind: str) -> None:
    async with peer_process("receive", kind) as process:
        destination = Destination(peer.DESTINATION, (Offer(kind, await next_line(process)),), PROTOCOL_VERSION)
        sender = make_sender(TransferConfig(transport=kind), new_layout(), peer.SOURCE, CPU)
        ticket = peer.ticket(peer.SOURCE, peer.DESTINATION)
        transfer = await sender.open(destination, ticket)
        transfer.send(peer.first_piece())
        assert await next_line(process) == "piece"
        process.kill()
        async with asyncio.timeout(NOTICED_S):
            for layer in range(1, new_layout().num_layers):
                transfer.send(replace(peer.first_piece(), layer_start=layer))
            with pytest.raises(PeerLost):
                await transfer.commit(1, timeout_s=30)
            with pytest.raises(PeerLost):
                await sender.open(destination, replace(ticket, attempt=2))
        await sender.close()


@pytest.mark.parametrize("kind", NETWORKED)
async def test_a_destination_notices_that_its_source_was_killed_and_takes_the_next_attempt(
    kind: str, new_wire: NewWire
) -> None:
    wire = await new_wire(kind)
    destination = wire.receiver.destination
    pieces: list[KVPiece] = []

    def keep(piece: KVPiece, release: Release) -> None:
        pieces.append(replace(piece, data=piece.data.clone()))
        release()

    reception = wire.receiver.expect(peer.TRANSFER_ID, peer.NUM_TOKENS, 0, keep)
    async with peer_process("send", kind, destination.offers[0].address, destination.incarnation) as process:
        await until(lambda: len(pieces) == 1, "the first piece", timeout_s=30)
        process.kill()
        await until(lambda: wire.receiver.stats.transfers_failed == 1, "the loss noticed", NOTICED_S)

    ticket = peer.ticket(wire.source_incarnation, destination.incarnation)
    transfer = await wire.sender.open(destination, replace(ticket, attempt=2))
    for layer in range(wire.layout.num_layers):
        transfer.send(replace(peer.first_piece(), layer_start=layer))
    await transfer.commit(9, timeout_s=5)
    assert (await reception.committed()).first_token == 9
    assert all(torch.equal(piece.data, peer.first_piece().data) for piece in pieces)
