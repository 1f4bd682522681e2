"""KV from one GPU memory to another place, checked: over the loopback, and over NCCL between two ranks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import replace

import torch
from torch import Tensor

from common.errors import ServingError
from common.identity import Ticket, new_incarnation, new_transfer_id
from common.kv_layout import KVLayout
from common.rpc import bind_port, new_server
from common.transfer_config import TransferConfig
from gpucheck.figures import Figure, at_most, failed, plain, skipped
from kv_transfer.factory import make_receiver, make_sender
from kv_transfer.loopback import LoopbackNetwork
from kv_transfer.plan import LayerGroups
from kv_transfer.transport import KVPiece, Release

TIMEOUT_S = 20.0
LAYOUT = KVLayout("random", num_layers=8, num_kv_heads=8, head_dim=128, dtype="bfloat16", rope="none")


def check_transfer(
    source: torch.device, destination: torch.device, transports: tuple[str, ...], *, num_tokens: int
) -> Iterator[Figure]:
    """Source and destination may be one GPU. NCCL refuses two ranks on one, which is no failure of ours."""
    for transport in transports:
        name = f"transfer_{transport}"
        try:
            wrong, seconds = asyncio.run(_transfer(transport, source, destination, num_tokens))
        except (ServingError, RuntimeError) as error:
            if source == destination and transport == "torch_dist" and source.type == "cuda":
                yield skipped(name, f"NCCL takes two GPUs for two ranks, here is one ({type(error).__name__})")
            else:
                yield failed(name, f"{type(error).__name__}: {error}")
        else:
            yield at_most(f"{name}_wrong_numbers", wrong, "numbers", 0)
            yield plain(f"{name}_rate", num_tokens * LAYOUT.token_bytes / seconds / 1e9, "GB/s")


async def _transfer(
    transport: str, source: torch.device, destination: torch.device, num_tokens: int
) -> tuple[int, float]:
    """How many numbers arrived changed, and the seconds from the first piece to the confirmed commit."""
    config = TransferConfig(transport=transport)
    network, source_incarnation, destination_incarnation = LoopbackNetwork(), new_incarnation(), new_incarnation()
    async with AsyncExitStack() as stack:
        server = new_server()
        stack.push_async_callback(server.stop, None)
        receiver = make_receiver(config, LAYOUT, destination_incarnation, destination, network)
        stack.push_async_callback(receiver.close)
        sender = make_sender(config, LAYOUT, source_incarnation, source, network)
        stack.push_async_callback(sender.close)
        receiver.add_to_server(server)
        await receiver.open(bind_port(server, "127.0.0.1", 0))
        await server.start()
        ticket = Ticket(new_transfer_id(), 1, source_incarnation, destination_incarnation, num_tokens, 0)
        landed: list[KVPiece] = []

        def keep(piece: KVPiece, release: Release) -> None:
            landed.append(replace(piece, data=piece.data.clone()))
            release()

        reception = receiver.expect(ticket.transfer_id, num_tokens, 0, keep)
        data = _noise(num_tokens, source)
        outgoing = await sender.open(receiver.destination, ticket)
        start_s = time.perf_counter()
        for piece in _pieces(data):
            outgoing.send(piece)
        await outgoing.commit(1, TIMEOUT_S)
        await reception.committed()
        seconds = time.perf_counter() - start_s
        reception.close()
        return _num_wrong(landed, data), seconds


def _noise(num_tokens: int, device: torch.device) -> Tensor:
    shape = (LAYOUT.num_layers, 2, num_tokens, LAYOUT.num_kv_heads, LAYOUT.head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)


def _pieces(data: Tensor) -> Iterator[KVPiece]:
    """As a prefill worker cuts them, each in memory of its own."""
    groups = LayerGroups(LAYOUT, data.shape[2], piece_bytes=1 << 20)
    for layer in range(LAYOUT.num_layers):
        for part in groups.ready_after(layer):
            cut = data[part.layer_start : part.layer_end, :, part.token_start : part.token_end]
            yield KVPiece(part.layer_start, part.token_start, cut.contiguous())


def _num_wrong(landed: list[KVPiece], data: Tensor) -> int:
    arrived = torch.full_like(data, float("nan"), device="cpu")
    for piece in landed:
        layers = slice(piece.layer_start, piece.layer_start + piece.num_layers)
        arrived[layers, :, piece.token_start : piece.token_start + piece.num_tokens] = piece.data.cpu()
    return int((arrived != data.cpu()).sum())
