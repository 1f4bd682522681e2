"""A socket for messages, on the event loop: the handshake, then verdicts, credit and refusals from the destination.

bytes of the message (u32) │ message: a LinkRequest or a LinkReply
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from common.errors import PeerLost, TlsMismatch
from kv_transfer.data_connection import MAX_MESSAGE_BYTES

END_S = 1.0  # for a last message to leave

# TLS's first record, of any version; as the size of a message this would be beyond MAX_MESSAGE_BYTES.
TLS_BEGINNINGS = (b"\x16\x03\x01", b"\x16\x03\x02", b"\x16\x03\x03")
TLS_AT_SOURCE, TLS_AT_DESTINATION = [
    f"TLS for KV (transfer.tls, or security.cluster_tls) is configured at the {one} and not at the {other}; "
    "set it on both sides or on neither"
    for one, other in (("source", "destination"), ("destination", "source"))
]
_NOT_TLS = {"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"}  # OpenSSL's words for clear text

_SIZE = struct.Struct("<I")
AnyMessage = TypeVar("AnyMessage", bound=Message)


class ControlConnection:
    """Raises PeerLost wherever the socket fails, TlsMismatch where only the source has TLS. Calls of one kind never
    overlap."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @staticmethod
    async def over(connected: socket.socket, tls: ssl.SSLContext | None, is_server: bool) -> ControlConnection:
        """Takes the socket over."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(MAX_MESSAGE_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        with _connection_errors():
            if is_server:
                transport, _ = await loop.connect_accepted_socket(lambda: protocol, connected, ssl=tls)
            else:
                hostname = None if tls is None else ""  # the cluster's own authority vouches for any of its hosts
                with _clear_answers():
                    transport, _ = await loop.create_connection(
                        lambda: protocol, sock=connected, ssl=tls, server_hostname=hostname
                    )
        return ControlConnection(reader, asyncio.StreamWriter(transport, protocol, reader, loop))

    async def read(self, kind: type[AnyMessage]) -> AnyMessage:
        with _connection_errors():
            size = await self._reader.readexactly(_SIZE.size)
            if size.startswith(TLS_BEGINNINGS):
                raise TlsMismatch(TLS_AT_SOURCE)
            (num_bytes,) = _SIZE.unpack(size)
            if num_bytes > MAX_MESSAGE_BYTES:
                raise PeerLost(f"the peer announces a message of {num_bytes} bytes; {MAX_MESSAGE_BYTES} are the most")
            return kind.FromString(await self._reader.readexactly(num_bytes))

    async def write(self, message: Message) -> None:
        serialized = message.SerializeToString()
        with _connection_errors():
            self._writer.write(_SIZE.pack(len(serialized)) + serialized)
            await self._writer.drain()

    async def finish(self) -> None:
        """Close it once everything written has left, within END_S."""
        try:
            async with asyncio.timeout(END_S):
                self._writer.close()
                await self._writer.wait_closed()
        except (OSError, TimeoutError):
            self.abort()

    def abort(self) -> None:
        """Close it now; whoever reads gets PeerLost. Safe to call twice."""
        self._writer.transport.abort()


@contextmanager
def _clear_answers() -> Iterator[None]:
    """To a source that speaks TLS."""
    try:
        yield
    except ssl.SSLError as error:
        if error.reason in _NOT_TLS:
            raise TlsMismatch(TLS_AT_SOURCE) from error
        raise


@contextmanager
def _connection_errors() -> Iterator[None]:
    try:
        yield
    except asyncio.IncompleteReadError as error:
        raise PeerLost("the peer ended the KV link") from error
    except DecodeError as error:
        raise PeerLost("the peer sends what is no message") from error
    except ssl.SSLError as error:
        raise PeerLost(f"TLS failed, see transfer.tls: {error}") from error
    except OSError as error:
        raise PeerLost(f"the control connection failed: {error}") from error
