"""What tells one kind of socket link from another: how ends meet, and how payloads pass."""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from common.pb import kv_transfer_pb2 as pb
from kv_transfer.data_connection import DataConnection
from kv_transfer.link import Landing, ReceivedPayload


class PayloadSender(Protocol):
    """The source's end, on a connection's thread. Raises: PeerLost."""

    def meet(self, connection: DataConnection) -> None:
        """Once, first."""

    def send(self, connection: DataConnection, piece: pb.LinkRequest, payload: Tensor) -> None:
        """payload: [num_bytes] uint8. Puts its checksum into the piece."""

    def close(self) -> None:
        """After the last send."""


class PayloadReceiver(Protocol):
    """The destination's end, on a connection's thread. Raises: PeerLost, StagingOverrun."""

    def meet(self, connection: DataConnection) -> None: ...

    def receive(self, connection: DataConnection, piece: pb.Piece, num_bytes: int) -> ReceivedPayload: ...

    def close(self) -> None:
        """After the last receive."""


@dataclass(frozen=True)
class TlsContexts:
    """Both ends show a certificate of the cluster's own authority."""

    source: ssl.SSLContext
    destination: ssl.SSLContext


class Medium(Protocol):
    @property
    def transport(self) -> str: ...

    @property
    def num_connections(self) -> int:
        """Data connections of each link."""

    @property
    def tls(self) -> TlsContexts | None: ...

    async def connect(self, address: str) -> socket.socket:
        """A non-blocking one. Raises: OSError."""

    def listen(self, worker_address: str) -> tuple[socket.socket, str]:
        """A non-blocking one, and the address to offer. Raises: ConfigError."""

    def is_welcome(self, accepted: socket.socket) -> bool:
        """Judged by what the kernel knows of the peer."""

    def new_sender(self) -> PayloadSender: ...

    def new_receiver(self, landing: Landing) -> PayloadReceiver: ...
