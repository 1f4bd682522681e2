"""The source's end of a link over sockets: control on the event loop, each data connection on its thread."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from queue import SimpleQueue

from torch import Tensor

from common.errors import IncompatiblePeer, PeerLost, ServingError, TransferError, error_types
from common.pb import kv_transfer_pb2 as pb
from kv_transfer.control_connection import ControlConnection
from kv_transfer.data_connection import DataConnection, frame, socket_errors
from kv_transfer.inline import pack_on_host, to_host
from kv_transfer.link import PackedPayload
from kv_transfer.link_thread import LinkThread
from kv_transfer.meeting_point import CONTROL, DATA, MAX_CONNECTIONS
from kv_transfer.socket_medium import Medium, PayloadSender
from kv_transfer.wire import LATE_CHECKSUM_VERSION

# Ahead of a connection's thread, which is woken less often when there are many.
_MAX_AHEAD_BYTES = 8 * 1024 * 1024
_ROOM_AHEAD_BYTES = _MAX_AHEAD_BYTES // 2


class SocketSource:
    """A SourceChannel."""

    def __init__(self, medium: Medium, stall_timeout_s: float, address: str) -> None:
        """stall_timeout_s: a destination that takes nothing for so long is lost."""
        self.wire_name = medium.transport
        self._stall_timeout_s = stall_timeout_s
        self._medium = medium
        self._address = address
        self._control: ControlConnection | None = None
        self._payloads: PayloadSender | None = None
        self._senders: list[_DataSender] = []
        self._loss: str | None = None
        self._hashes_late = False  # on the connections' threads, where a payload is touched anyway

    async def pack(self, flat: Tensor) -> PackedPayload:
        return PackedPayload(await to_host(flat), None) if self._hashes_late else await pack_on_host(flat)

    async def write(self, request: pb.LinkRequest, payload: Tensor | None = None) -> None:
        """Up to `attach` on the control connection, then on the data connections."""
        if self._loss is not None:
            raise PeerLost(self._loss)
        if payload is not None:
            assert self._senders, "attach comes before the first piece"
            sender = min(self._senders, key=lambda sender: sender.num_ahead_bytes)
            await sender.put(_Outgoing(request, payload))
        elif self._senders:
            # No commit or abort may overtake a piece: the destination acts on it when it has come on all of them.
            for sender in self._senders:
                await sender.put(_Outgoing(request))
        else:
            if self._control is None:
                self._control = await self._connect_control()
            await self._control.write(request)

    async def read(self) -> pb.LinkReply:
        assert self._control is not None, "the first write connects"
        try:
            reply = await self._control.read(pb.LinkReply)
        except PeerLost as lost:
            raise PeerLost(self._loss or f"{self._address}: {lost.message}") from lost
        if reply.HasField("refusal"):
            raise _to_error(reply.refusal, self._address)
        return reply

    async def attach(self, welcome: pb.LinkWelcome) -> None:
        if not 0 < welcome.num_connections <= MAX_CONNECTIONS:
            raise PeerLost(f"{self._address} asks for {welcome.num_connections} data connections")
        self._hashes_late = welcome.protocol_version >= LATE_CHECKSUM_VERSION
        self._payloads = self._medium.new_sender()
        senders: list[_DataSender] = []
        try:
            for number in range(welcome.num_connections):
                connection = DataConnection(await self._connect(DATA + welcome.data_token))
                name = f"kv-send-{self.wire_name}-{number}"
                senders.append(_DataSender(name, connection, self._payloads, self._stall_timeout_s, self._lose))
            for sender in senders:
                await sender.is_attached
        finally:
            self._senders = senders  # `close` ends them also if some failed

    async def close(self) -> None:
        self._loss = self._loss or "the KV link was closed"
        if self._control is not None:
            self._control.abort()
        for sender in self._senders:
            sender.end()
        for sender in self._senders:  # kept until then: if this is cancelled, the next close goes on from here
            await sender.join()
        self._senders = []
        if self._payloads is not None:
            self._payloads.close()
            self._payloads = None

    async def _connect_control(self) -> ControlConnection:
        connected = await self._connect(CONTROL)
        tls = self._medium.tls
        return await ControlConnection.over(connected, tls.source if tls else None, is_server=False)

    async def _connect(self, prologue: bytes) -> socket.socket:
        async with AsyncExitStack() as undo:
            try:
                connected = await self._medium.connect(self._address)
                undo.callback(connected.close)
                await asyncio.get_running_loop().sock_sendall(connected, prologue)
            except OSError as error:
                raise PeerLost(f"nobody receives KV at {self._address}: {error}") from error
            undo.pop_all()
            return connected

    def _lose(self, reason: str) -> None:
        """On the event loop. One connection lost is the link lost; `read` says so."""
        self._loss = self._loss or f"{self._address}: {reason}"
        if self._control is not None:
            self._control.abort()


@dataclass(frozen=True)
class _Outgoing:
    request: pb.LinkRequest
    payload: Tensor | None = None


class _DataSender:
    """One data connection and its thread. `put` and what follows it belong to the event loop."""

    def __init__(
        self,
        name: str,
        connection: DataConnection,
        payloads: PayloadSender,
        stall_timeout_s: float,
        on_loss: Callable[[str], None],
    ) -> None:
        self.is_attached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self._connection = connection
        self._payloads = payloads
        self._stall_timeout_s = stall_timeout_s
        self._on_loss = on_loss
        self._queue: SimpleQueue[_Outgoing | None] = SimpleQueue()
        self._num_put_bytes = 0  # counted by the loop
        self._num_sent_bytes = 0  # counted by the thread
        self._is_waiting = False  # somebody, for room
        self._has_room = asyncio.Event()
        self._is_over = False
        self._thread = LinkThread(name, self._run)

    @property
    def num_ahead_bytes(self) -> int:
        return self._num_put_bytes - self._num_sent_bytes

    async def put(self, outgoing: _Outgoing) -> None:
        """Returns when there is room for another. Raises: PeerLost when nothing has left for stall_timeout_s."""
        if outgoing.payload is not None:
            self._num_put_bytes += outgoing.payload.numel()
        self._queue.put(outgoing)
        if self.num_ahead_bytes > _MAX_AHEAD_BYTES and not self._is_over:
            self._has_room.clear()
            self._is_waiting = True
            if self.num_ahead_bytes > _ROOM_AHEAD_BYTES:  # else the thread may have looked before it was told
                await self._until_room()

    async def _until_room(self) -> None:
        while not self._has_room.is_set():
            num_sent_bytes = self._num_sent_bytes
            with suppress(TimeoutError):
                async with asyncio.timeout(self._stall_timeout_s):
                    await self._has_room.wait()
            if not self._has_room.is_set() and self._num_sent_bytes == num_sent_bytes:
                raise PeerLost(f"the destination has taken no KV for {self._stall_timeout_s} s")

    def end(self) -> None:
        self._connection.end()
        self._queue.put(None)
        self._has_room.set()

    async def join(self) -> None:
        """After `end`."""
        await self._thread.join()
        self._connection.close()
        if not self.is_attached.done():
            self.is_attached.cancel()
        elif not self.is_attached.cancelled():
            self.is_attached.exception()  # whoever attached has heard of it, or was cancelled

    def _run(self) -> None:
        try:
            with socket_errors():
                self._payloads.meet(self._connection)
                self._tell(self._attached)
                while (outgoing := self._queue.get()) is not None:
                    self._send(outgoing)
        except ServingError as lost:
            self._tell(lambda error=lost: self._fail(error))  # type: ignore[misc]

    def _send(self, outgoing: _Outgoing) -> None:
        if outgoing.payload is None:
            self._connection.send(frame(outgoing.request))
            return
        self._payloads.send(self._connection, outgoing.request, outgoing.payload)
        self._num_sent_bytes += outgoing.payload.numel()
        if self._is_waiting and self.num_ahead_bytes <= _ROOM_AHEAD_BYTES:
            self._is_waiting = False
            self._tell(self._has_room.set)

    def _tell(self, call: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is gone, and with it everyone who would have heard
            self._loop.call_soon_threadsafe(call)

    def _attached(self) -> None:
        if not self.is_attached.done():
            self.is_attached.set_result(None)

    def _fail(self, error: ServingError) -> None:
        self._is_over = True
        self._has_room.set()
        if not self.is_attached.done():
            self.is_attached.set_exception(error)
        self._on_loss(error.message)


def _to_error(refusal: pb.LinkRefusal, address: str) -> ServingError:
    kind = error_types().get(refusal.error_type, PeerLost)
    if issubclass(kind, TransferError | IncompatiblePeer):
        return kind(refusal.error)
    return PeerLost(f"{address}: {refusal.error}")
