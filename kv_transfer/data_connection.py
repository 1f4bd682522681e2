"""A socket for payloads: one thread blocks in it, the event loop can end it. All frames go to the destination.

    message bytes (u32) │ payload bytes (u32) │ message: a LinkRequest │ payload, straight from and into tensors

The payload's size stands beside the message and not in it, so that a header that lies is refused like any other bad
piece instead of turning what follows into rubbish.
"""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from google.protobuf.message import DecodeError

from common.errors import PeerLost
from common.pb import kv_transfer_pb2 as pb
from kv_transfer.staging import StagingOverrun
from kv_transfer.wire import MAX_PIECE_BYTES

MAX_MESSAGE_BYTES = 64 * 1024  # of a message without its payload; also of everything on a control connection
_FILE = b"F"  # a descriptor needs a byte to travel with
_SIZES = struct.Struct("<II")


class DataConnection:
    """Methods fail as sockets do; `socket_errors` around them turns that into PeerLost."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(True)
        self._socket = connected
        self._sizes = memoryview(bytearray(_SIZES.size))
        self._message = memoryview(bytearray(MAX_MESSAGE_BYTES))

    def secure(self, context: ssl.SSLContext, is_server: bool, timeout_s: float) -> None:
        self._socket.settimeout(timeout_s)
        secured = context.wrap_socket(self._socket, server_side=is_server, do_handshake_on_connect=False)
        self._socket = secured  # already here, so that `end` can end the handshake
        secured.do_handshake()
        secured.settimeout(None)

    def send(self, *parts: bytes | memoryview) -> None:
        if isinstance(self._socket, ssl.SSLSocket):
            for part in parts:
                self._socket.sendall(part)
            return
        num_sent = self._socket.sendmsg(parts)
        for part in parts:
            if num_sent < len(part):
                self._socket.sendall(memoryview(part)[num_sent:])
            num_sent = max(0, num_sent - len(part))

    def receive_frame(self) -> tuple[pb.LinkRequest, int]:
        """The next message, and how many bytes of payload follow it. Raises: PeerLost, StagingOverrun."""
        self.receive_into(self._sizes)
        message_bytes, payload_bytes = _SIZES.unpack(self._sizes)
        if message_bytes > MAX_MESSAGE_BYTES:
            raise PeerLost(f"the source announces a message of {message_bytes} bytes; {MAX_MESSAGE_BYTES} are the most")
        if payload_bytes > MAX_PIECE_BYTES:
            raise StagingOverrun(f"a piece announces {payload_bytes} bytes; {MAX_PIECE_BYTES} are the most")
        message = self._message[:message_bytes]
        self.receive_into(message)
        try:
            return pb.LinkRequest.FromString(message.tobytes()), payload_bytes
        except DecodeError as error:
            raise PeerLost("the source sends what is no message") from error

    def receive_into(self, view: memoryview) -> None:
        """Fill it. Raises: PeerLost."""
        flags = 0 if isinstance(self._socket, ssl.SSLSocket) else socket.MSG_WAITALL  # TLS sockets know no flags
        while len(view) > 0:
            num_bytes = self._socket.recv_into(view, 0, flags)
            if num_bytes == 0:
                raise PeerLost("the source has left")
            view = view[num_bytes:]

    def receive_bytes(self, limit: int) -> int:
        """Wait for bytes that mean nothing but their number: how many came, from 1 to limit. Raises: PeerLost."""
        num_bytes = len(self._socket.recv(limit))
        if num_bytes == 0:
            raise PeerLost("the peer has left")
        return num_bytes

    def send_file(self, descriptor: int) -> None:
        """Of an open file, on a unix socket; the peer receives one of its own."""
        socket.send_fds(self._socket, [_FILE], [descriptor])

    def receive_file(self) -> int:
        """Its descriptor, the caller's to close. Raises: PeerLost."""
        message, descriptors, _, _ = socket.recv_fds(self._socket, len(_FILE), 1)
        if message != _FILE or len(descriptors) != 1:
            raise PeerLost("the source sends no file where one is due")
        return descriptors[0]

    def end(self) -> None:
        """Wake the thread that waits in it, and let it fail. Safe from any thread."""
        with suppress(OSError):  # the peer was faster
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # TLS's own would let ciphertext pass for data

    def close(self) -> None:
        """When no thread uses it any more."""
        self._socket.close()


def frame(request: pb.LinkRequest, payload_bytes: int = 0) -> bytes:
    """All of a frame but its payload."""
    message = request.SerializeToString()
    return _SIZES.pack(len(message), payload_bytes) + message


@contextmanager
def socket_errors() -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: TLS's word for a socket that is shut down
        raise PeerLost(f"a data connection failed: {error}") from error
