"""One transport and the raw limits beside it, between this process and its peer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from common.identity import Ticket, new_incarnation, new_transfer_id
from common.transfer_config import TransferConfig
from kv_transfer.factory import make_sender
from kv_transfer.transport import Destination, KVSender, OutgoingTransfer
from transferbench.payload import LAYOUT, Payload
from transferbench.peer import CPU, Expect, Open, OpenRaw, Peer, ReceiveRaw
from transferbench.raw import Raw, RawSource
from transferbench.raw_libraries import new_source

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Sample:
    """One transfer, averaged over a few in a row."""

    num_bytes: int
    seconds: float  # the first piece is sent → the other end has, and has verified, all of them
    cpu_s: float  # of both processes


class TransportLink:
    """Make one with `linked`."""

    def __init__(self, peer: Peer, sender: KVSender, incarnation: str, destination: Destination) -> None:
        self._peer = peer
        self._sender = sender
        self._incarnation = incarnation
        self._destination = destination
        self._has_room = asyncio.Event()
        sender.on_room = self._has_room.set

    async def piece_bytes(self) -> int:
        """What suits the link, which is made and measured if it is new. Raises: ServingError."""
        probe = await self._sender.open(self._destination, self._ticket(new_transfer_id(), 1))
        probe.abort()
        return probe.piece_bytes

    async def sample(self, payload: Payload, count: int) -> Sample:
        """`count` transfers, one after the other, and one before them that does not count. Raises: ServingError."""
        first, *ids = [new_transfer_id() for _ in range(1 + count)]
        await self._peer.ask(Expect((first, *ids), payload.num_tokens))
        await self._send(payload, first)
        cpu_s = -time.process_time() - await self._peer.cpu_s()
        seconds = 0.0
        for transfer_id in ids:
            seconds += await self._send(payload, transfer_id)
        cpu_s += time.process_time() + await self._peer.cpu_s()
        return Sample(payload.num_bytes, seconds / count, cpu_s / count)

    async def _send(self, payload: Payload, transfer_id: bytes) -> float:
        transfer = await self._sender.open(self._destination, self._ticket(transfer_id, payload.num_tokens))
        start_s = time.perf_counter()
        for piece in payload.pieces:
            await self._until_room(transfer)
            transfer.send(piece)
        await transfer.commit(0, TIMEOUT_S)
        return time.perf_counter() - start_s

    async def _until_room(self, transfer: OutgoingTransfer) -> None:
        while not transfer.has_room:
            self._has_room.clear()
            async with asyncio.timeout(TIMEOUT_S):
                await self._has_room.wait()

    def _ticket(self, transfer_id: bytes, num_tokens: int) -> Ticket:
        return Ticket(transfer_id, 1, self._incarnation, self._destination.incarnation, num_tokens)


@asynccontextmanager
async def linked(peer: Peer, config: TransferConfig) -> AsyncIterator[TransportLink]:
    """Raises: ConfigError where there is no such transport here, ServingError when it does not start."""
    incarnation = new_incarnation()
    async with AsyncExitStack() as stack:
        sender = make_sender(config, LAYOUT, incarnation, CPU)
        stack.push_async_callback(sender.close)
        destination = await peer.ask(Open(config))
        assert isinstance(destination, Destination)
        yield TransportLink(peer, sender, incarnation, destination)


class RawLink:
    def __init__(self, peer: Peer, kind: Raw, source: RawSource) -> None:
        self._peer = peer
        self._kind = kind
        self._source = source

    async def sample(self, payload: Payload, count: int) -> Sample:
        """As TransportLink's. Raises: OSError, RuntimeError."""
        await self._run(payload, 1)
        cpu_s = -time.process_time() - await self._peer.cpu_s()
        seconds = await self._run(payload, count)
        cpu_s += time.process_time() + await self._peer.cpu_s()
        return Sample(payload.num_bytes, seconds / count, cpu_s / count)

    async def _run(self, payload: Payload, count: int) -> float:
        buffers = payload.buffers
        self._peer.order(ReceiveRaw(self._kind, tuple(payload.sizes), count))
        seconds = await asyncio.to_thread(self._send, buffers, count)
        await asyncio.to_thread(self._peer.answer)
        return seconds

    def _send(self, buffers: list[memoryview], count: int) -> float:
        start_s = time.perf_counter()
        for _ in range(count):
            self._source.send(buffers)
        return time.perf_counter() - start_s


@asynccontextmanager
async def raw_linked(peer: Peer, kind: Raw) -> AsyncIterator[RawLink]:
    address = await peer.ask(OpenRaw(kind))
    assert isinstance(address, str)
    source = new_source(kind, address)
    try:
        yield RawLink(peer, kind, source)
    finally:
        source.close()
