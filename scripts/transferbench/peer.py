"""The other process: destinations of both kinds, driven by orders over a pipe. One answer to each order.

Orders are values, so that the pipe can carry them; what goes wrong over there is raised here, by `Peer.answer`.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import time
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from types import TracebackType

import torch

from common.errors import ServingError, TransferTimeout
from common.identity import new_incarnation
from common.rpc import bind_port, new_server
from common.transfer_config import TransferConfig
from kv_transfer.factory import make_receiver
from kv_transfer.transport import Destination, KVPiece, KVReceiver, Reception, Release
from transferbench.payload import LAYOUT
from transferbench.raw import Raw, RawDestination
from transferbench.raw_libraries import new_destination

CPU = torch.device("cpu")
ANSWER_S = 120.0
END_S = 10.0


@dataclass(frozen=True)
class Open:
    """Answered with a Destination."""

    config: TransferConfig


@dataclass(frozen=True)
class Expect:
    """These transfers, and no others any more."""

    transfer_ids: tuple[bytes, ...]
    num_tokens: int


@dataclass(frozen=True)
class OpenRaw:
    """Answered with its address."""

    kind: Raw


@dataclass(frozen=True)
class ReceiveRaw:
    """`count` times pieces of `sizes` bytes; answered when all are here."""

    kind: Raw
    sizes: tuple[int, ...]
    count: int


@dataclass(frozen=True)
class CpuTime:
    """Answered with the seconds of CPU that the process has used, in all its threads."""


Order = Open | Expect | OpenRaw | ReceiveRaw | CpuTime
Answer = Destination | str | float | None | Exception


class Peer:
    """`with Peer() as peer:` the process lives as long as the block, however that ends."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_main, args=(theirs,), name="transferbench-peer", daemon=True)
        self._process.start()
        theirs.close()  # so that its death ends our wait

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._connection.close()  # asks it to end
        self._process.join(END_S)
        self._process.kill()
        self._process.join()

    def order(self, order: Order) -> None:
        """To be followed by one call of `answer`."""
        self._connection.send(order)

    def answer(self) -> Destination | str | float | None:
        """Raises: whatever the other process raised, TransferTimeout, ConnectionError when it has died."""
        if not self._connection.poll(ANSWER_S):
            raise TransferTimeout(f"the other process did not answer within {ANSWER_S:.0f} s")
        try:
            answer: Answer = self._connection.recv()
        except EOFError as error:
            raise ConnectionError("the other process died") from error
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def ask(self, order: Order) -> Destination | str | float | None:
        self.order(order)
        return await asyncio.to_thread(self.answer)

    async def cpu_s(self) -> float:
        seconds = await self.ask(CpuTime())
        assert isinstance(seconds, float)
        return seconds


def _main(connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is the bench's, which then ends the pipe
    asyncio.run(_serve(connection))


async def _serve(connection: Connection) -> None:
    async with _Destinations() as destinations:
        while True:
            try:
                order: Order = await asyncio.to_thread(connection.recv)
            except EOFError:
                return
            try:
                answer: Answer = await destinations.follow(order)
            except (ServingError, OSError, RuntimeError, ValueError) as error:
                answer = type(error)(str(error))  # without its cause, which may not pickle
            except Exception as error:
                answer = RuntimeError(repr(error))
            try:
                connection.send(answer)
            except OSError:  # nobody waits for it any more
                return


@dataclass
class _Destinations:
    """At most one receiver, and one raw destination of each kind."""

    receiver: KVReceiver | None = None
    receptions: list[Reception] = field(default_factory=list)
    raw: dict[Raw, RawDestination] = field(default_factory=dict)
    held: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def __aenter__(self) -> _Destinations:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with ExitStack() as stack:
            for destination in self.raw.values():
                stack.callback(destination.close)
        await self.held.aclose()

    async def follow(self, order: Order) -> Answer:
        match order:
            case Open(config):
                return await self._open(config)
            case Expect(transfer_ids, num_tokens):
                self._expect(transfer_ids, num_tokens)
                return None
            case OpenRaw(kind):
                self.raw[kind] = new_destination(kind)
                return self.raw[kind].address
            case ReceiveRaw(kind, sizes, count):
                await asyncio.to_thread(_receive, self.raw[kind], sizes, count)
                return None
            case CpuTime():
                return time.process_time()

    async def _open(self, config: TransferConfig) -> Destination:
        server = new_server()
        receiver = make_receiver(config, LAYOUT, new_incarnation(), CPU)
        self.held.push_async_callback(server.stop, None)
        self.held.push_async_callback(receiver.close)
        receiver.add_to_server(server)
        address = bind_port(server, "127.0.0.1", 0)
        await receiver.open(address)
        await server.start()
        self.receiver = receiver
        return receiver.destination

    def _expect(self, transfer_ids: tuple[bytes, ...], num_tokens: int) -> None:
        assert self.receiver is not None, "Open comes first"
        for reception in self.receptions:
            reception.close()
        self.receptions = [self.receiver.expect(each, num_tokens, 0, _release_at_once) for each in transfer_ids]


def _release_at_once(_piece: KVPiece, release: Release) -> None:
    """It is verified; where it would go from here is the engine's time, not the transport's."""
    release()


def _receive(destination: RawDestination, sizes: tuple[int, ...], count: int) -> None:
    for _ in range(count):
        destination.receive(sizes)
