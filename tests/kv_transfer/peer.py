"""The other end as a process of its own, so that a test can kill it: python -m tests.kv_transfer.peer MODE KIND ..."""

from __future__ import annotations

import asyncio
import sys

import torch

from common.identity import Ticket
from common.rpc import bind_port, new_server
from common.transfer_config import TransferConfig
from kv_transfer.factory import make_receiver, make_sender
from kv_transfer.transport import Destination, KVPiece, Offer
from kv_transfer.wire import PROTOCOL_VERSION
from tests.kv_transfer.wires import CPU, new_layout

SOURCE, DESTINATION = "a-source", "a-destination"
TRANSFER_ID = b"killed-transfer!"
NUM_TOKENS = 8


def ticket(source: str, destination: str) -> Ticket:
    return Ticket(TRANSFER_ID, 1, source, destination, NUM_TOKENS)


def first_piece() -> KVPiece:
    layout = new_layout()
    return KVPiece(0, 0, torch.ones(1, 2, NUM_TOKENS, layout.num_kv_heads, layout.head_dim))


async def receive(kind: str) -> None:
    """Expect the transfer, say where, and say so when its first piece is in."""
    receiver = make_receiver(TransferConfig(transport=kind), new_layout(), DESTINATION, CPU)
    server = new_server()
    receiver.add_to_server(server)
    await receiver.open(bind_port(server, "127.0.0.1", 0))
    await server.start()
    receiver.expect(TRANSFER_ID, NUM_TOKENS, 0, lambda piece, release: print("piece", flush=True))
    print(receiver.destination.offers[0].address, flush=True)
    await server.wait_for_termination()


async def send(kind: str, address: str, incarnation: str) -> None:
    """Send the first piece, and then nothing more."""
    sender = make_sender(TransferConfig(transport=kind), new_layout(), SOURCE, CPU)
    transfer = await sender.open(
        Destination(incarnation, (Offer(kind, address),), PROTOCOL_VERSION), ticket(SOURCE, incarnation)
    )
    transfer.send(first_piece())
    await asyncio.Event().wait()


if __name__ == "__main__":
    mode, *arguments = sys.argv[1:]
    asyncio.run(receive(*arguments) if mode == "receive" else send(*arguments))
