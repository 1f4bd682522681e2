"""KV between processes of one Linux host: payloads through shared memory, everything else over a socket beside it.

    source's tensor ──copy──▶ ring in shared memory ──copy, then hash──▶ destination's private staging

Both ends keep the same ring: the source places pieces in it and frees them by credit, a header says where. What is
verified lies where no peer can write. The memory and the sockets have no names in any file system: they end with the
processes, however those end.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import secrets
import socket
import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from common.errors import PeerLost, VersionMismatch
from common.pb import kv_transfer_pb2 as pb
from kv_transfer.data_connection import DataConnection, frame
from kv_transfer.link import Landing, ReceivedPayload
from kv_transfer.socket_medium import Outgoing, TlsContexts
from kv_transfer.staging import StagingRing, ring_bytes
from kv_transfer.wire import checksum_of

_BACKLOG = 64
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

    async def connect(self, address: str) -> socket.socket:
        connecting = socket.socket(socket.AF_UNIX)
        try:
            connecting.setblocking(False)
            await asyncio.get_running_loop().sock_connect(connecting, f"\0{address}")
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

    def new_sender(self, welcome: pb.LinkWelcome) -> ShmSender:
        if welcome.credit_bytes == 0:
            raise VersionMismatch("shm needs a destination that gives credit, protocol version 2")
        return ShmSender(ring_bytes(welcome.credit_bytes))

    def new_receiver(self, welcome: pb.LinkWelcome, landing: Landing) -> ShmReceiver:
        return ShmReceiver(ring_bytes(welcome.credit_bytes), landing)


class ShmSender:
    """A PayloadSender. Makes the memory, which is not touched before it is used: an idle link costs nothing."""

    def __init__(self, num_bytes: int) -> None:
        self._file = os.memfd_create("pdserve-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._file, num_bytes)
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, _SEALS)
        memory = torch.frombuffer(mmap.mmap(self._file, num_bytes), dtype=torch.uint8)
        self._ring: StagingRing | None = StagingRing(memory, lambda num_bytes: None)

    def meet(self, connection: DataConnection) -> None:
        connection.send_file(self._file)

    def place(self, request: pb.LinkRequest, payload: Tensor) -> Outgoing:
        assert self._ring is not None, "nothing leaves after close"
        place = self._ring.take(payload.numel())
        request.piece.offset = place.offset
        return Outgoing(frame(request, payload.numel()), payload, place.flat)

    def send(self, connection: DataConnection, outgoing: Outgoing) -> None:
        if outgoing.payload is not None and outgoing.place is not None:
            np.copyto(outgoing.place.numpy(), outgoing.payload.numpy())  # without the GIL, on this thread alone
        connection.send(outgoing.frame)

    def on_credit(self, num_bytes: int) -> None:
        assert self._ring is not None, "nobody reads after close"
        self._ring.free_oldest(num_bytes)

    def close(self) -> None:
        """The memory goes with the last view of it."""
        if self._ring is not None:
            self._ring = None
            os.close(self._file)


class ShmReceiver:
    """A PayloadReceiver."""

    def __init__(self, num_bytes: int, landing: Landing) -> None:
        self._num_bytes = num_bytes
        self._landing = landing
        self._ring: Bytes | None = None

    def meet(self, connection: DataConnection) -> None:
        file = connection.receive_file()
        try:
            if fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS != _SEALS or os.fstat(file).st_size != self._num_bytes:
                raise PeerLost("the source's shared memory is not what was agreed on")
            mapped = mmap.mmap(file, self._num_bytes, prot=mmap.PROT_READ)
        except OSError as error:
            raise PeerLost(f"the source's shared memory cannot be used: {error}") from error
        finally:
            os.close(file)
        self._ring = np.frombuffer(mapped, dtype=np.uint8)

    def receive(self, connection: DataConnection, piece: pb.Piece, num_bytes: int) -> ReceivedPayload:
        assert self._ring is not None, "meet comes first"
        if piece.offset + num_bytes > self._num_bytes:
            raise PeerLost(f"a piece lies at {piece.offset} of {self._num_bytes} bytes and is {num_bytes} long")
        staged = self._landing.staging.take(num_bytes)
        np.copyto(staged.flat.numpy(), self._ring[piece.offset : piece.offset + num_bytes])
        return ReceivedPayload(staged, checksum_of(staged.flat))

    def close(self) -> None:
        self._ring = None
