"""Two ends of each transport on one machine, faults between them, and a check that nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from importlib.util import find_spec

import grpc
import pytest
import torch
from torch import Tensor

from common.identity import Ticket, new_incarnation, new_transfer_id
from common.kv_layout import KVLayout
from common.pb import kv_transfer_pb2 as pb
from common.rpc import new_server
from common.transfer_config import TransferConfig
from kv_transfer.factory import Surroundings, make_receiver, make_sender, new_way
from kv_transfer.heads import HeadRange
from kv_transfer.link import Arrival, DestinationChannel, Endpoint, PackedPayload, SourceChannel, Way
from kv_transfer.link import Landing as Land
from kv_transfer.loopback import LoopbackNetwork
from kv_transfer.receiver import LinkReceiver
from kv_transfer.sender import LinkSender
from kv_transfer.shm import Shm
from kv_transfer.socket_listener import SocketListener
from kv_transfer.transport import KVPiece, Reception, Release, TransferStats

_NEEDS_NIXL = pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed")
KINDS = ["loopback", "grpc", "tcp", "shm", "torch_dist", pytest.param("nixl", marks=_NEEDS_NIXL)]
SOCKETS = ["tcp", "shm"]
TIMEOUT_S = 5.0
CPU = torch.device("cpu")

# What becomes of one request on its way: itself, changed, doubled, or nothing.
Fault = Callable[[pb.LinkRequest], list[pb.LinkRequest]]
# What becomes of a payload before it is sent.
Damage = Callable[[Tensor], Tensor]
# What becomes of a frame that has come.
Spoil = Callable[[Arrival], Arrival]


def new_layout(dtype: str = "float32", num_layers: int = 4) -> KVLayout:
    return KVLayout("tiny", num_layers=num_layers, num_kv_heads=2, head_dim=8, dtype=dtype, rope="none")


class FaultyChannel:
    def __init__(self, inner: SourceChannel, fault: Fault, damage: Damage) -> None:
        self._inner = inner
        self._fault = fault
        self._damage = damage

    @property
    def wire_name(self) -> str:
        return self._inner.wire_name

    async def pack(self, flat: Tensor) -> PackedPayload:
        return await self._inner.pack(flat)

    async def write(self, request: pb.LinkRequest, payload: Tensor | None = None) -> None:
        for passed in self._fault(request):
            await self._inner.write(passed, payload if payload is None else self._damage(payload))

    async def read(self) -> pb.LinkReply:
        return await self._inner.read()

    async def attach(self, welcome: pb.LinkWelcome) -> None:
        await self._inner.attach(welcome)

    async def close(self) -> None:
        await self._inner.close()


class SpoilingChannel:
    """A destination's end whose frames are spoiled as they come."""

    def __init__(self, inner: DestinationChannel, spoil: Spoil) -> None:
        self._inner = inner
        self._spoil = spoil
        self.wire_name = inner.wire_name

    async def read(self) -> Arrival:
        return self._spoil(await self._inner.read())

    async def write(self, reply: pb.LinkReply) -> None:
        await self._inner.write(reply)

    def trust(self) -> None:
        self._inner.trust()

    async def prepare(self, welcome: pb.LinkWelcome, landing: Land) -> None:
        await self._inner.prepare(welcome, landing)

    async def attach(self) -> None:
        await self._inner.attach()

    async def close(self) -> None:
        await self._inner.close()


@dataclass
class Landing:
    """What a decode worker keeps: the pieces of one reception, in a tensor of its own."""

    layout: KVLayout
    num_tokens: int
    reception: Reception = field(init=False)
    pieces: list[KVPiece] = field(default_factory=list)

    def on_piece(self, piece: KVPiece, release: Release) -> None:
        self.pieces.append(replace(piece, data=piece.data.clone()))
        release()

    @property
    def data(self) -> Tensor:
        """[layers, 2, num_tokens, heads, head_dim], zero where nothing arrived; later pieces overwrite."""
        shape = (self.layout.num_layers, 2, self.num_tokens, self.layout.num_kv_heads, self.layout.head_dim)
        data = torch.zeros(shape, dtype=getattr(torch, self.layout.dtype))
        for piece in self.pieces:
            layers = slice(piece.layer_start, piece.layer_start + piece.num_layers)
            data[layers, :, piece.token_start : piece.token_start + piece.num_tokens] = piece.data
        return data


class Wire:
    """One sender and one receiver of a kind. The receiver can lose its links, and be replaced at its address."""

    def __init__(self, kind: str, layout: KVLayout) -> None:
        self.kind = kind
        self.layout = layout
        self.network = LoopbackNetwork()
        self.source_incarnation = new_incarnation()
        self.config = TransferConfig(transport=kind)
        self.sender = make_sender(self.config, layout, self.source_incarnation, CPU, self.network)
        self.receiver = make_receiver(self.config, layout, new_incarnation(), CPU, self.network)
        self.spoil: Spoil = lambda arrival: arrival
        serve = self.receiver.serve
        self.receiver.serve = lambda channel, staging_device: serve(  # type: ignore[method-assign]  # for its listeners
            SpoilingChannel(channel, lambda arrival: self.spoil(arrival)), staging_device
        )
        self._server: grpc.aio.Server | None = None
        self._senders = [self.sender]
        self._receivers = [self.receiver]

    async def start(self, address: str = "127.0.0.1:0") -> None:
        if self.kind == "loopback":
            await self.receiver.open("loopback:1")
            return
        if self.kind in SOCKETS:
            await self.receiver.open(address)
            return
        self._server = new_server()
        self.receiver.add_to_server(self._server)
        port = self._server.add_insecure_port(address)
        await self.receiver.open(f"127.0.0.1:{port}")
        await self._server.start()

    async def cut(self) -> None:
        """The destination's links break; its receptions live on, and it can be reached again."""
        if self._server is None:
            names = ("kv-loopback-", "kv-serve-")
            for task in [task for task in asyncio.all_tasks() if task.get_name().startswith(names)]:
                task.cancel()
                await asyncio.wait([task])
            return
        address = self.receiver.destination.offers[0].address
        await self._server.stop(grace=None)
        self._server = new_server()
        self.receiver.add_to_server(self._server)
        assert self._server.add_insecure_port(address)
        await self._server.start()

    async def replace_receiver(self) -> None:
        """The destination's process dies, and another one takes its address."""
        address = self.receiver.destination.offers[0].address
        if self._server is not None:
            await self._server.stop(grace=None)
        await self.receiver.close()
        self.receiver = self._new_receiver(address)
        self._receivers.append(self.receiver)
        await self.start(address)

    def _new_receiver(self, address: str) -> LinkReceiver:
        """One that listens there."""
        incarnation = new_incarnation()
        if self.kind == "shm":
            endpoint = Endpoint(self.layout, incarnation, HeadRange(0, self.layout.num_kv_heads))
            return LinkReceiver(
                endpoint, [SocketListener(Shm(address), TIMEOUT_S)], lambda transport: CPU, self.config, TransferStats()
            )
        tcp_port = int(address.rpartition(":")[2]) if self.kind == "tcp" else 0
        return make_receiver(replace(self.config, tcp_port=tcp_port), self.layout, incarnation, CPU, self.network)

    def new_sender(
        self,
        layout: KVLayout | None = None,
        fault: Fault = lambda request: [request],
        damage: Damage = lambda payload: payload,
    ) -> LinkSender:
        """Another source process; its frames pass through `fault`, its payloads through `damage`."""
        layout = layout or self.layout
        endpoint = Endpoint(layout, self.source_incarnation, HeadRange(0, layout.num_kv_heads))
        dial = new_way(self.kind, Surroundings(CPU, self.config, network=self.network)).dial
        way = Way(self.kind, lambda address: FaultyChannel(dial(address), fault, damage))
        sender = LinkSender(endpoint, [way], self.config)
        self._senders.append(sender)
        return sender

    def expect(self, num_tokens: int, skip_tokens: int = 0) -> tuple[Landing, Ticket]:
        transfer_id = new_transfer_id()
        landing = Landing(self.layout, num_tokens)
        landing.reception = self.receiver.expect(transfer_id, num_tokens, skip_tokens, landing.on_piece)
        incarnation = self.receiver.destination.incarnation
        return landing, Ticket(transfer_id, 1, self.source_incarnation, incarnation, num_tokens, skip_tokens)

    def new_data(self, num_tokens: int, seed: int = 0) -> Tensor:
        shape = (self.layout.num_layers, 2, num_tokens, self.layout.num_kv_heads, self.layout.head_dim)
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(shape, generator=generator).to(getattr(torch, self.layout.dtype))

    async def close(self) -> None:
        for sender in self._senders:
            await sender.close()
        for receiver in self._receivers:
            await receiver.close()
        if self._server is not None:
            await self._server.stop(grace=None)


@dataclass(frozen=True)
class Held:
    """What a process holds on to. gRPC keeps its own threads and descriptors for the life of the process."""

    tasks: int
    threads: int
    descriptors: int

    def is_within(self, before: Held) -> bool:
        """Less is fine: what came earlier may end meanwhile."""
        return self.tasks <= before.tasks and self.threads <= before.threads and self.descriptors <= before.descriptors

    @staticmethod
    def now() -> Held:
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("kv-")]
        return Held(len(asyncio.all_tasks()), len(threads), len(os.listdir("/proc/self/fd")))


async def until(condition: Callable[[], bool], what: str, timeout_s: float = 5.0) -> None:
    """Wait for a condition that other tasks or threads bring about, bounded."""
    try:
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.002)
    except TimeoutError:
        pytest.fail(f"not within {timeout_s} s: {what}")


NewWire = Callable[..., Awaitable[Wire]]
