"""KV over plain TCP, straight from and into staging memory: for networks without RDMA. TLS where configured."""

from __future__ import annotations

import asyncio
import socket
import ssl
import sys
from dataclasses import dataclass

from torch import Tensor

from common.errors import ConfigError
from common.pb import kv_transfer_pb2 as pb
from common.transfer_config import TlsFiles
from kv_transfer.data_connection import DataConnection, frame
from kv_transfer.link import Landing, ReceivedPayload
from kv_transfer.socket_medium import TlsContexts
from kv_transfer.wire import buffer_of, checksum_of

_DEAD_AFTER_MS = 2000  # as soon as gRPC's keepalive (common/rpc.py) finds a dead host or a cut link
_UNSENT_BYTES = 512 * 1024  # more waiting in the kernel only pushes it out of the caches before it is sent
_BACKLOG = 64


@dataclass(frozen=True)
class Tcp:
    """A Medium."""

    port: int = 0  # to listen on; 0: any free one
    num_connections: int = 1
    tls: TlsContexts | None = None
    handshake_timeout_s: float = 10.0  # TLS on a data connection
    transport: str = "tcp"

    async def connect(self, address: str) -> socket.socket:
        host, port = _split(address)
        loop = asyncio.get_running_loop()
        family, kind, protocol, _, resolved = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
        connecting = socket.socket(family, kind, protocol)
        try:
            connecting.setblocking(False)
            _set_options(connecting)
            await loop.sock_connect(connecting, resolved)
        except BaseException:
            connecting.close()
            raise
        return connecting

    def listen(self, worker_address: str) -> tuple[socket.socket, str]:
        host, _ = _split(worker_address)
        try:
            family, _, _, _, resolved = socket.getaddrinfo(host, self.port, type=socket.SOCK_STREAM)[0]
            listening = socket.create_server((resolved[0], self.port), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"transfer.tcp_port: cannot listen on {host}:{self.port}: {error.strerror}; choose another port"
            ) from error
        listening.setblocking(False)
        return listening, f"{worker_address.rpartition(':')[0]}:{listening.getsockname()[1]}"

    def is_welcome(self, accepted: socket.socket) -> bool:
        _set_options(accepted)
        return True  # who it is, the handshake asks

    def new_sender(self) -> TcpSender:
        return TcpSender(self)

    def new_receiver(self, landing: Landing) -> TcpReceiver:
        return TcpReceiver(self, landing)


@dataclass(frozen=True)
class TcpSender:
    """A PayloadSender."""

    tcp: Tcp

    def meet(self, connection: DataConnection) -> None:
        if self.tcp.tls is not None:
            connection.secure(self.tcp.tls.source, False, self.tcp.handshake_timeout_s)

    def send(self, connection: DataConnection, piece: pb.LinkRequest, payload: Tensor) -> None:
        piece.piece.checksum = checksum_of(payload)  # and leaves it in the cache for the socket's copy
        connection.send(frame(piece, payload.numel()), buffer_of(payload))

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class TcpReceiver:
    """A PayloadReceiver."""

    tcp: Tcp
    landing: Landing

    def meet(self, connection: DataConnection) -> None:
        if self.tcp.tls is not None:
            connection.secure(self.tcp.tls.destination, True, self.tcp.handshake_timeout_s)

    def receive(self, connection: DataConnection, piece: pb.Piece, num_bytes: int) -> ReceivedPayload:
        staged = self.landing.staging.take(num_bytes)
        connection.receive_into(buffer_of(staged.flat))
        return ReceivedPayload(staged, checksum_of(staged.flat))

    def close(self) -> None:
        pass


def tls_contexts(files: TlsFiles) -> TlsContexts:
    """Raises: ConfigError when a file cannot be read."""
    try:
        return TlsContexts(
            _context(files, ssl.PROTOCOL_TLS_CLIENT),
            _context(files, ssl.PROTOCOL_TLS_SERVER),
        )
    except OSError as error:
        raise ConfigError(f"transfer.tls: cannot use {files.cert}, {files.key} and {files.ca}: {error}") from error


def _context(files: TlsFiles, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the authority is the cluster's own: whom it certified belongs here, at any address
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(files.cert, files.key)
    context.load_verify_locations(files.ca)
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # a source that never reads would leave them in its buffer, and reset on close
    return context


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _set_options(connected: socket.socket) -> None:
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_AFTER_MS)
