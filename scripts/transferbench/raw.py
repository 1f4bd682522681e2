"""The raw limits: the same pieces moved with nothing around them, no identity, no checksum, no credit.

A destination is made first, in the other process; a source connects to its address. Everything here blocks.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence
from enum import StrEnum
from multiprocessing.shared_memory import SharedMemory
from typing import Protocol

from kv_transfer.wire import MAX_PIECE_BYTES

WINDOW_BYTES = 64 * 1024 * 1024  # pieces land in memory as large as a link's staging window, one after the other
NUM_SLOTS = 8
DONE = b"."


class Raw(StrEnum):
    SOCKET = "socket"
    SHARED_MEMORY = "shm_in_turns"  # a piece is copied in, then out, then the next one is copied in
    SHARED_MEMORY_RING = "shm_overlapped"  # one piece is copied out while the next is copied in
    GLOO = "gloo"
    GRPC_STREAM = "grpc_stream"


class RawSource(Protocol):
    def send(self, pieces: Sequence[memoryview]) -> None:
        """Returns once the other end has all of them."""

    def close(self) -> None: ...


class RawDestination(Protocol):
    window: Window

    @property
    def address(self) -> str: ...

    def receive(self, sizes: Sequence[int]) -> None:
        """What one `send` sends: pieces of `sizes` bytes."""

    def close(self) -> None: ...


class Window:
    """Memory that pieces land in, round and round."""

    def __init__(self) -> None:
        self.memory = memoryview(bytearray(b"\1") * WINDOW_BYTES)  # touched: its pages are there
        self._next = 0

    def take(self, num_bytes: int) -> memoryview:
        if self._next + num_bytes > WINDOW_BYTES:
            self._next = 0
        start, self._next = self._next, self._next + num_bytes
        return self.memory[start : self._next]


class SocketDestination:
    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._connection: socket.socket | None = None
        self.window = Window()

    @property
    def address(self) -> str:
        host, port = self._listener.getsockname()
        return f"{host}:{port}"

    def receive(self, sizes: Sequence[int]) -> None:
        if self._connection is None:
            self._connection, _ = self._listener.accept()
        for size in sizes:
            if self._connection.recv_into(self.window.take(size), size, socket.MSG_WAITALL) != size:
                raise ConnectionError("the source has left")
        self._connection.sendall(DONE)

    def close(self) -> None:
        self._listener.close()
        if self._connection is not None:
            self._connection.close()


class SocketSource:
    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._connection = socket.create_connection((host, int(port)))
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, pieces: Sequence[memoryview]) -> None:
        for piece in pieces:
            self._connection.sendall(piece)
        _read_done(self._connection)

    def close(self) -> None:
        self._connection.close()


class SharedMemoryDestination:
    """Slots in shared memory. A byte each way over a Unix socket says that one is full, and that it is free again."""

    def __init__(self, num_slots: int) -> None:
        self._memory = SharedMemory(create=True, size=num_slots * MAX_PIECE_BYTES)
        self._num_slots = num_slots
        self._listener = socket.socket(socket.AF_UNIX)
        self.address = f"{num_slots}/{self._memory.name}/{secrets.token_hex(8)}"
        self._listener.bind(_abstract(self.address))
        self._listener.listen(1)
        self._connection: socket.socket | None = None
        self.window = Window()
        self._next = 0

    def receive(self, sizes: Sequence[int]) -> None:
        if self._connection is None:
            self._connection, _ = self._listener.accept()
        for size in sizes:
            _read_done(self._connection)
            start = self._next * MAX_PIECE_BYTES
            self.window.take(size)[:] = _mapped(self._memory)[start : start + size]
            self._next = (self._next + 1) % self._num_slots
            self._connection.sendall(DONE)

    def close(self) -> None:
        self._listener.close()
        if self._connection is not None:
            self._connection.close()
        self._memory.close()
        self._memory.unlink()


class SharedMemorySource:
    def __init__(self, address: str) -> None:
        num_slots, name, _ = address.split("/")
        self._num_slots = int(num_slots)
        self._memory = SharedMemory(name)
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(_abstract(address))
        self._next = 0

    def send(self, pieces: Sequence[memoryview]) -> None:
        for index, piece in enumerate(pieces):
            if index >= self._num_slots:
                _read_done(self._connection)
            start = self._next * MAX_PIECE_BYTES
            _mapped(self._memory)[start : start + len(piece)] = piece
            self._next = (self._next + 1) % self._num_slots
            self._connection.sendall(DONE)
        for _ in range(min(len(pieces), self._num_slots)):
            _read_done(self._connection)

    def close(self) -> None:
        self._connection.close()
        self._memory.close()


def _mapped(memory: SharedMemory) -> memoryview:
    assert memory.buf is not None, "it is closed at the end alone"
    return memory.buf


def _abstract(address: str) -> str:
    """A Unix socket's name that is no file."""
    return f"\0pdserve-bench/{address}"


def _read_done(connection: socket.socket) -> None:
    if connection.recv(1) != DONE:
        raise ConnectionError("the other end has left")
