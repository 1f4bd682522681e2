"""The raw limits that libraries set: a gloo pair, and a gRPC stream of plain bytes. Then every kind by its name."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import grpc
import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from kv_transfer.torch_pair import DESTINATION, SOURCE, GlooPair, Moving
from transferbench.raw import (
    NUM_SLOTS,
    Raw,
    RawDestination,
    RawSource,
    SharedMemoryDestination,
    SharedMemorySource,
    SocketDestination,
    SocketSource,
    Window,
)

TIMEOUT_S = 60.0
MESSAGE_BYTES = 256 * 1024
SERVICE, METHOD = "pdserve.bench", "Send"


def new_destination(kind: Raw) -> RawDestination:
    match kind:
        case Raw.SOCKET:
            return SocketDestination()
        case Raw.SHARED_MEMORY:
            return SharedMemoryDestination(num_slots=1)
        case Raw.SHARED_MEMORY_RING:
            return SharedMemoryDestination(NUM_SLOTS)
        case Raw.GLOO:
            return GlooDestination()
        case Raw.GRPC_STREAM:
            return GrpcDestination()


def new_source(kind: Raw, address: str) -> RawSource:
    match kind:
        case Raw.SOCKET:
            return SocketSource(address)
        case Raw.SHARED_MEMORY | Raw.SHARED_MEMORY_RING:
            return SharedMemorySource(address)
        case Raw.GLOO:
            return GlooSource(address)
        case Raw.GRPC_STREAM:
            return GrpcSource(address)


class GlooDestination:
    """Pairs are made with the first pieces: that takes both ends at once. Several pieces are under way."""

    def __init__(self) -> None:
        timeout = timedelta(seconds=TIMEOUT_S)
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        self.address = f"127.0.0.1:{self._store.port}"
        self._pair: GlooPair | None = None
        self.window = Window()

    def receive(self, sizes: Sequence[int]) -> None:
        if self._pair is None:
            self._pair = GlooPair(self._store, DESTINATION, "127.0.0.1", TIMEOUT_S)
        pair = self._pair
        _move(pair.receive(_tensor(self.window.take(size))) for size in sizes)
        pair.send(torch.ones(1, dtype=torch.uint8)).finish(TIMEOUT_S)

    def close(self) -> None:
        self._pair = None


class GlooSource:
    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._store = TCPStore(host, int(port), wait_for_workers=False, timeout=timedelta(seconds=TIMEOUT_S))
        self._pair: GlooPair | None = None

    def send(self, pieces: Sequence[memoryview]) -> None:
        if self._pair is None:
            self._pair = GlooPair(self._store, SOURCE, "127.0.0.1", TIMEOUT_S)
        pair = self._pair
        _move(pair.send(_tensor(piece)) for piece in pieces)
        pair.receive(torch.empty(1, dtype=torch.uint8)).finish(TIMEOUT_S)

    def close(self) -> None:
        self._pair = None


def _move(moving: Iterator[Moving]) -> None:
    under_way: deque[Moving] = deque()
    for each in moving:
        under_way.append(each)
        if len(under_way) == NUM_SLOTS:
            under_way.popleft().finish(TIMEOUT_S)
    for each in under_way:
        each.finish(TIMEOUT_S)


class GrpcDestination:
    """One call for each `send`, with messages of MESSAGE_BYTES; they are copied to where pieces land."""

    def __init__(self) -> None:
        self.window = Window()
        self._received: queue.Queue[int] = queue.Queue()
        self._server = grpc.server(ThreadPoolExecutor(1))
        handlers = {METHOD: grpc.stream_unary_rpc_method_handler(self._on_call)}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def receive(self, sizes: Sequence[int]) -> None:
        num_bytes = self._received.get(timeout=TIMEOUT_S)
        if num_bytes != sum(sizes):
            raise ConnectionError(f"{num_bytes} bytes came over gRPC, not {sum(sizes)}")

    def close(self) -> None:
        self._server.stop(grace=None).wait()

    def _on_call(self, messages: Iterator[bytes], _context: grpc.ServicerContext) -> bytes:
        num_bytes = 0
        for message in messages:
            self.window.take(len(message))[:] = message
            num_bytes += len(message)
        self._received.put(num_bytes)
        return b""


class GrpcSource:
    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address)
        self._call = partial(self._channel.stream_unary(f"/{SERVICE}/{METHOD}", bytes, bytes), timeout=TIMEOUT_S)

    def send(self, pieces: Sequence[memoryview]) -> None:
        self._call(_messages(pieces))

    def close(self) -> None:
        self._channel.close()


def _messages(pieces: Sequence[memoryview]) -> Iterator[bytes]:
    for piece in pieces:
        for start in range(0, len(piece), MESSAGE_BYTES):
            yield bytes(piece[start : start + MESSAGE_BYTES])


def _tensor(memory: memoryview) -> Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)
