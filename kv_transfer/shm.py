"""KV between processes of one Linux host: payloads through shared memory, everything else over a socket beside it.

    source's tensor ──copy──▶ ring in shared memory ──copy, then hash──▶ destination's private staging

The ring is small, so that what passes through it stays in the CPU's caches. Each header says where its piece lies; once
copied out, the destination answers with a byte. What is verified lies where no peer can write. The memory and the
sockets have no names in any file system: they end with the processes, however those end.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import secrets
import socket
import struct
import time
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from common.errors import PeerLost
from common.pb import kv_transfer_pb2 as pb
from kv_transfer.data_connection import DataConnection, frame
from kv_transfer.link import Landing, ReceivedPayload
from kv_transfer.socket_medium import TlsContexts
from kv_transfer.staging import Staged, StagingRing
from kv_transfer.wire import MAX_PIECE_BYTES, checksum_of

_BACKLOG = 64  # links that wait to be accepted
_NEXT_TRY_S = 0.005
_RING_BYTES = MAX_PIECE_BYTES
_MAX_PLACED = 64  # pieces; far fewer than answers that a socket holds, so that nobody ever waits to send one
_COPIED_OUT = b"."
_CREDENTIALS = struct.Struct("3i")  # SO_PEERCRED: process, user, group
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL  # memory that shrinks kills whoever reads it

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Shm:
    """A Medium. Addresses are names in Linux's abstract namespace, which is the network namespace's own."""

    name: str = ""  # to listen at; empty: a random one
    transport: str = "shm"
    num_connections: int = 1
    tls: TlsContexts | None = None
    queue_timeout_s: float = 5.0  # for a place among those that wait to be accepted

    async def connect(self, address: str) -> socket.socket:
        connecting = socket.socket(socket.AF_UNIX)
        try:
            connecting.setblocking(False)
            give_up_at = time.monotonic() + self.queue_timeout_s
            while not _has_place(connecting, address):
                if time.monotonic() > give_up_at:
                    raise TimeoutError(f"too many others have waited to be accepted for {self.queue_timeout_s} s")
                await asyncio.sleep(_NEXT_TRY_S)
        except BaseException:
            connecting.close()
            raise
        return connecting

    def listen(self, worker_address: str) -> tuple[socket.socket, str]:
        name = self.name or f"pdserve-kv-{secrets.token_hex(16)}"
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(f"\0{name}")
        listening.listen(_BACKLOG)
        listening.setblocking(False)
        return listening, name

    def is_welcome(self, accepted: socket.socket) -> bool:
        credentials = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, user, _ = _CREDENTIALS.unpack(credentials)
        return bool(user == os.geteuid())

    def new_sender(self) -> ShmSender:
        return ShmSender()

    def new_receiver(self, landing: Landing) -> ShmReceiver:
        return ShmReceiver(landing)


def _has_place(connecting: socket.socket, address: str) -> bool:
    """Whether it is connected now. A unix socket never is later: with the queue full, nothing has begun."""
    try:
        connecting.connect(f"\0{address}")
    except BlockingIOError:
        return False
    return True


class ShmSender:
    """A PayloadSender. It makes the ring."""

    def __init__(self) -> None:
        self._ring: StagingRing | None = None
        self._placed: deque[Staged] = deque()  # not copied out yet, oldest first

    def meet(self, connection: DataConnection) -> None:
        file = os.memfd_create("pdserve-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(file, _RING_BYTES)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
            memory = torch.frombuffer(mmap.mmap(file, _RING_BYTES), dtype=torch.uint8)
            connection.send_file(file)
        except OSError as error:
            raise PeerLost(f"no shared memory to be had: {error}") from error
        finally:
            os.close(file)
        self._ring = StagingRing(memory, lambda num_bytes: None)

    def send(self, connection: DataConnection, piece: pb.LinkRequest, payload: Tensor) -> None:
        place = self._place(connection, payload.numel())
        np.copyto(place.flat.numpy(), payload.numpy())  # without the GIL, and on this thread alone
        piece.piece.checksum = checksum_of(place.flat)  # which is in the cache now
        piece.piece.offset = place.offset
        connection.send(frame(piece, payload.numel()))

    def close(self) -> None:
        self._ring = None
        self._placed.clear()

    def _place(self, connection: DataConnection, num_bytes: int) -> Staged:
        """Waits until the destination has made room."""
        assert self._ring is not None, "meet comes first"
        while len(self._placed) == _MAX_PLACED or (place := self._ring.take_if_room(num_bytes)) is None:
            for _ in range(connection.receive_bytes(_MAX_PLACED)):
                if not self._placed:
                    raise PeerLost("the destination copied out more pieces than there were")
                self._placed.popleft().release()
        self._placed.append(place)
        return place


class ShmReceiver:
    """A PayloadReceiver."""

    def __init__(self, landing: Landing) -> None:
        self._landing = landing
        self._ring: Bytes | None = None

    def meet(self, connection: DataConnection) -> None:
        file = connection.receive_file()
        try:
            if fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS != _SEALS or os.fstat(file).st_size != _RING_BYTES:
                raise PeerLost("the source's shared memory is not what was agreed on")
            mapped = mmap.mmap(file, _RING_BYTES, prot=mmap.PROT_READ)
        except OSError as error:
            raise PeerLost(f"the source's shared memory cannot be used: {error}") from error
        finally:
            os.close(file)
        self._ring = np.frombuffer(mapped, dtype=np.uint8)

    def receive(self, connection: DataConnection, piece: pb.Piece, num_bytes: int) -> ReceivedPayload:
        assert self._ring is not None, "meet comes first"
        if piece.offset + num_bytes > _RING_BYTES:
            raise PeerLost(f"a piece of {num_bytes} bytes lies at {piece.offset} of {_RING_BYTES}")
        staged = self._landing.staging.take(num_bytes)
        np.copyto(staged.flat.numpy(), self._ring[piece.offset : piece.offset + num_bytes])
        connection.send(_COPIED_OUT)
        return ReceivedPayload(staged, checksum_of(staged.flat))

    def close(self) -> None:
        self._ring = None
