"""One end of a transfer as a process in a network namespace: python -m tests.kv_transfer.net_peer MODE KIND ...

It says on stdout, a line each, how far it is; the source goes on with its next step at each line on stdin.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import torch

from common.errors import ServingError
from common.identity import Ticket
from common.rpc import bind_port, new_server
from common.transfer_config import TransferConfig
from kv_transfer.factory import make_receiver, make_sender
from kv_transfer.receiver import LinkReceiver
from kv_transfer.transport import Destination, KVPiece, Offer, Release
from kv_transfer.wire import PROTOCOL_VERSION
from tests.kv_transfer.wires import CPU, new_layout

SOURCE, DESTINATION = "a-source", "a-destination"
TRANSFER_ID = b"through-the-net!"
NUM_TOKENS = 64
COMMIT_S = 60.0  # a cut link must be noticed long before


def data() -> torch.Tensor:
    layout = new_layout()
    shape = (layout.num_layers, 2, NUM_TOKENS, layout.num_kv_heads, layout.head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


async def receive(kind: str, host: str) -> None:
    landed = torch.zeros_like(data())

    def on_piece(piece: KVPiece, release: Release) -> None:
        landed[piece.layer_start : piece.layer_start + piece.num_layers] = piece.data
        release()
        say(f"piece {piece.layer_start}")

    async with serving(kind, host) as receiver:
        reception = receiver.expect(TRANSFER_ID, NUM_TOKENS, 0, on_piece)
        say(receiver.destination.offers[0].address)
        committed = await reception.committed()
        is_equal = torch.equal(landed, data())
        say(f"committed attempt {committed.ticket.attempt} {'equal' if is_equal else 'wrong'}")
        await asyncio.Event().wait()


@asynccontextmanager
async def serving(kind: str, host: str) -> AsyncIterator[LinkReceiver]:
    receiver = make_receiver(TransferConfig(transport=kind), new_layout(), DESTINATION, CPU)
    server = new_server()
    receiver.add_to_server(server)
    await receiver.open(bind_port(server, host, 0))
    await server.start()
    yield receiver


async def send(kind: str) -> None:
    """The first line says where to. Each attempt stops after its first piece, until it is told to go on."""
    address = await told()
    sender = make_sender(TransferConfig(transport=kind), new_layout(), SOURCE, CPU)
    destination = Destination(DESTINATION, (Offer(kind, address),), PROTOCOL_VERSION)
    pieces = [KVPiece(layer, 0, part.contiguous()) for layer, part in enumerate(torch.split(data(), 1))]
    first_ticket = Ticket(TRANSFER_ID, 1, SOURCE, DESTINATION, NUM_TOKENS)
    for attempt in (1, 2):
        try:
            transfer = await sender.open(destination, replace(first_ticket, attempt=attempt))
            transfer.send(pieces[0])
            say(f"begun {attempt}")
            await told()
            for piece in pieces[1:]:
                transfer.send(piece)
            await transfer.commit(7, COMMIT_S)
            say("confirmed")
        except ServingError as error:
            say(type(error).__name__)
            await told()
    await sender.close()


def say(line: str) -> None:
    print(line, flush=True)


async def told() -> str:
    line: str = await asyncio.to_thread(sys.stdin.readline)
    return line.strip()


if __name__ == "__main__":
    mode, *arguments = sys.argv[1:]
    asyncio.run(receive(*arguments) if mode == "receive" else send(*arguments))
