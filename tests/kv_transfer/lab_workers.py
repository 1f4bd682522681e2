"""Prefill and decode workers with everything real but the model and the network, and each able to die."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import TypeVar

import grpc
import torch

from common.errors import WorkerLost
from common.identity import new_incarnation
from common.pb import serving_pb2 as pb
from common.rpc import bind_port, new_server
from common.transfer_config import MIB, TransferConfig
from decode_worker.intake import KVIntake
from decode_worker.worker import DecodeWorker
from engine.async_engine import AsyncEngine
from kv_transfer.factory import Surroundings, make_receiver, new_way
from kv_transfer.heads import HeadRange
from kv_transfer.link import DestinationChannel, Endpoint, Way
from kv_transfer.loopback import LoopbackNetwork
from kv_transfer.receiver import LinkReceiver
from kv_transfer.sender import LinkSender
from kv_transfer.shm import Shm
from kv_transfer.socket_listener import SocketListener
from prefill_worker.kv_push import KVPush
from prefill_worker.worker import PrefillWorker
from tests.kv_transfer.faults import FaultPlan, FaultyDestination, FaultySource, Past, Staging
from tests.kv_transfer.truth import CPU, LAYOUT, TruthCheck, new_true_engine

SECRET = b"of this lab"
SERVED_OVER_GRPC = ("grpc", "torch_dist")
T = TypeVar("T")


@dataclass(frozen=True)
class Patience:
    """How long anybody waits. Short where frames get lost, since each loss costs as much; long where nothing may."""

    connect_s: float = 1.0
    commit_s: float = 0.5
    stall_s: float = 0.5


@dataclass(frozen=True)
class LabNetwork:
    """What the workers of one lab share."""

    kind: str
    plan: FaultPlan
    patience: Patience
    network: LoopbackNetwork = field(default_factory=LoopbackNetwork)
    past: Past = field(default_factory=Past)

    @property
    def config(self) -> TransferConfig:
        return TransferConfig(
            transport=self.kind,
            piece_bytes=4096,
            window_bytes=MIB,
            connect_timeout_s=self.patience.connect_s,
            stall_timeout_s=self.patience.stall_s,
            secret=SECRET,
        )


class Process:
    """The calls that one worker is serving. Its death ends them all, and they look lost to their callers."""

    def __init__(self) -> None:
        self.is_dead = False
        self.on_death: Callable[[], None] = lambda: None
        self._calls: set[asyncio.Task[object]] = set()

    async def serve(self, body: Coroutine[object, object, T]) -> T:
        """Raises: WorkerLost."""
        call = asyncio.create_task(body)
        self._calls.add(call)
        try:
            return await call
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is not None and caller.cancelling():
                raise
            raise WorkerLost("the worker died") from None
        finally:
            self._calls.discard(call)

    def die(self) -> None:
        if not self.is_dead:
            self.is_dead = True
            for call in self._calls:
                call.cancel()
            self.on_death()

    async def ended(self) -> None:
        if self._calls:
            await asyncio.wait(set(self._calls))


class PrefillNode:
    def __init__(self, around: LabNetwork) -> None:
        self.process = Process()
        self.incarnation = new_incarnation()
        self._truth = new_true_engine(num_blocks=128, block_size=4, max_num_batched_tokens=24)
        push = KVPush(self._truth.engine)
        self.check = TruthCheck(self._truth.engine, push)
        self.engine = AsyncEngine(self._truth.engine, tap=self.check)
        self.sender = _new_sender(around, self.incarnation, self.process.die)
        self.sender.on_room = self.engine.wake
        self._worker = PrefillWorker(self.engine, push, self.sender, around.patience.commit_s)

    async def prefill(self, request: pb.PrefillRequest) -> int:
        """The first token, once the decode worker has confirmed. Raises: WorkerLost, TransferError, ..."""
        return await self.process.serve(self._run(request))

    async def stop(self) -> list[str]:
        """What it still held."""
        await self.process.ended()
        await self.sender.close()
        leaks = await self.leaks()
        await self.engine.stop()
        return leaks

    async def leaks(self) -> list[str]:
        return [f"prefill: {leak}" for leak in await self.engine.call(lambda engine: self._truth.leaks)]

    async def _run(self, request: pb.PrefillRequest) -> int:
        first = -1
        events = self._worker.run(request)
        try:
            async for event in events:
                if event.HasField("first_token"):
                    first = event.first_token.token_id
        finally:
            await events.aclose()
        return first


class DecodeNode:
    def __init__(self, around: LabNetwork, address: str) -> None:
        """address: where to listen, as a dead predecessor did; empty: anywhere."""
        self.process = Process()
        self.staging = Staging()
        self._truth = new_true_engine(num_blocks=192, block_size=3, max_num_batched_tokens=64)
        self.check = TruthCheck(self._truth.engine)
        self.engine = AsyncEngine(self._truth.engine, tap=self.check)
        self.receiver = _new_receiver(around, address, self.staging, self.process.die)
        self._worker = DecodeWorker(self.engine, KVIntake(self.engine, self.receiver))
        self._kind = around.kind
        self._address = address
        self._server: grpc.aio.Server | None = None

    async def start(self) -> str:
        """Returns where it listens."""
        if self._kind in SERVED_OVER_GRPC:
            self._server = new_server()
            self.receiver.add_to_server(self._server)
            await self.receiver.open(bind_port(self._server, "127.0.0.1", _port(self._address)))
            await self._server.start()
        else:
            await self.receiver.open(self._address if self._kind == "loopback" else "127.0.0.1:0")
        return self.receiver.destination.offers[0].address

    async def decode(self, request: pb.DecodeRequest, on_event: Callable[[pb.DecodeEvent], None]) -> None:
        """Up to the last token. Raises: WorkerLost, NoFreeBlocks, ..."""
        await self.process.serve(self._run(request, on_event))

    async def stop(self) -> list[str]:
        """What it still held."""
        await self.process.ended()
        await self.receiver.close()
        if self._server is not None:
            await self._server.stop(grace=None)
        leaks = await self.leaks()
        await self.engine.stop()
        return leaks

    async def leaks(self) -> list[str]:
        blocks = await self.engine.call(lambda engine: self._truth.leaks)
        return [f"decode: {leak}" for leak in [*blocks, *self.staging.leaks]]

    async def _run(self, request: pb.DecodeRequest, on_event: Callable[[pb.DecodeEvent], None]) -> None:
        events = self._worker.generate(request)
        try:
            async for event in events:
                on_event(event)
        finally:
            await events.aclose()


def _new_sender(around: LabNetwork, incarnation: str, die: Callable[[], None]) -> LinkSender:
    endpoint = Endpoint(LAYOUT, incarnation, HeadRange(0, LAYOUT.num_kv_heads), SECRET)
    dial = new_way(around.kind, Surroundings(CPU, network=around.network)).dial
    way = Way(around.kind, lambda address: FaultySource(dial(address), around.plan, around.past, die))
    return LinkSender(endpoint, [way], around.config)


def _new_receiver(around: LabNetwork, address: str, staging: Staging, die: Callable[[], None]) -> LinkReceiver:
    incarnation = new_incarnation()
    if around.kind == "shm":
        endpoint = Endpoint(LAYOUT, incarnation, HeadRange(0, LAYOUT.num_kv_heads), SECRET)
        receiver = LinkReceiver(
            endpoint, [SocketListener(Shm(address), around.patience.connect_s)], lambda transport: CPU, around.config
        )
    else:
        config = replace(around.config, tcp_port=_port(address) if around.kind == "tcp" else 0)
        receiver = make_receiver(config, LAYOUT, incarnation, CPU, around.network)
    serve = receiver.serve

    def serve_faulty(channel: DestinationChannel, staging_device: torch.device) -> Awaitable[None]:
        return serve(FaultyDestination(channel, around.plan, staging, die), staging_device)

    receiver.serve = serve_faulty  # type: ignore[method-assign]  # its listeners are given this one
    return receiver


def _port(address: str) -> int:
    return int(address.rpartition(":")[2] or 0)
