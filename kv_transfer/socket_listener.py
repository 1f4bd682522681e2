"""The listening socket of a decode worker. Strangers learn nothing from it and cannot keep others out.

Until its source has proved itself, a connection is one of MAX_STRANGERS; one more, and the one that has been here
longest has to leave. Another user's process gets no such place.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from contextlib import suppress

from common.errors import PeerLost, ServingError, TlsMismatch, WrongSecret, wire_name
from common.pb import kv_transfer_pb2 as pb
from kv_transfer.control_connection import TLS_AT_DESTINATION, TLS_BEGINNINGS, ControlConnection
from kv_transfer.link import Serve
from kv_transfer.meeting_point import CONTROL, DATA, TOKEN_BYTES, MeetingPoint
from kv_transfer.socket_destination import SocketDestination
from kv_transfer.socket_medium import Medium

logger = logging.getLogger(__name__)

MAX_STRANGERS = 32
_PAUSE_S = 0.1  # after a failed accept: out of descriptors
_TURN = 32  # connections accepted before others on the event loop have theirs, however many more there are


class SocketListener:
    """A Listener."""

    def __init__(self, medium: Medium, handshake_timeout_s: float) -> None:
        self.transport = medium.transport
        self._medium = medium
        self._handshake_timeout_s = handshake_timeout_s
        self._meeting_point = MeetingPoint()
        self._strangers: dict[asyncio.Task[None], None] = {}  # longest here first
        self._tasks: set[asyncio.Task[None]] = set()
        self._listening: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None

    async def open(self, worker_address: str, serve: Serve) -> str:
        self._listening, address = self._medium.listen(worker_address)
        self._accepting = asyncio.create_task(self._accept(self._listening, serve), name=f"kv-accept-{self.transport}")
        return address

    async def close(self) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait([self._accepting])
        if self._listening is not None:
            self._listening.close()
        strangers = list(self._strangers)
        for task in strangers:
            task.cancel()
        if strangers:
            await asyncio.wait(strangers)

    async def _accept(self, listening: socket.socket, serve: Serve) -> None:
        loop = asyncio.get_running_loop()
        for number in itertools.count(1):
            if number % _TURN == 0:
                await asyncio.sleep(0)
            try:
                accepted, _ = await loop.sock_accept(listening)
            except OSError as error:
                logger.warning("cannot accept a KV connection: %s", error)
                await asyncio.sleep(_PAUSE_S)
                continue
            if not self._medium.is_welcome(accepted):
                accepted.close()
                continue
            task = asyncio.create_task(self._meet(accepted, serve), name=f"kv-serve-{self.transport}")
            self._tasks.add(task)
            self._strangers[task] = None
            task.add_done_callback(self._forget)
            if len(self._strangers) > MAX_STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]  # now: a burst is accepted without a turn for anybody's last words
                oldest.cancel()
                await asyncio.sleep(0)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._strangers.pop(task, None)

    async def _meet(self, accepted: socket.socket, serve: Serve) -> None:
        is_passed_on = False
        try:
            async with asyncio.timeout(self._handshake_timeout_s):
                prologue = await _receive(accepted, len(CONTROL))
                if prologue == DATA:
                    token = await _receive(accepted, TOKEN_BYTES)
                    is_passed_on = self._meeting_point.deliver(token, accepted)
                    return
                if prologue != CONTROL:
                    return
                tls = self._medium.tls
                if tls is not None and not (await _peek(accepted)).startswith(TLS_BEGINNINGS):
                    is_passed_on = True
                    await self._refuse_in_the_clear(accepted)
                    return
                is_passed_on = True
                control = await ControlConnection.over(accepted, tls.destination if tls else None, is_server=True)
        except (OSError, TimeoutError, PeerLost) as error:
            logger.info("a KV connection over %s did not begin: %s", self.transport, error)
            return
        finally:
            if not is_passed_on:
                accepted.close()
        await self._serve(control, serve)

    async def _serve(self, control: ControlConnection, serve: Serve) -> None:
        stranger = asyncio.current_task()
        assert stranger is not None, "runs in a task of its own"
        channel = SocketDestination(
            self._medium, control, self._meeting_point, on_trusted=lambda: self._strangers.pop(stranger, None)
        )
        try:
            await serve(channel)
        except ServingError as ended:
            logger.info("a KV link over %s ended: %s", self.transport, ended.message)
            if channel.is_trusted or isinstance(ended, WrongSecret | TlsMismatch):
                await _refuse(control, ended)
        finally:
            control.abort()

    async def _refuse_in_the_clear(self, accepted: socket.socket) -> None:
        """Tells whoever begins a link, as a source without TLS does. Raises: PeerLost."""
        control = await ControlConnection.over(accepted, None, is_server=True)
        try:
            if (await control.read(pb.LinkRequest)).HasField("hello"):
                logger.warning("refused a KV link over %s: %s", self.transport, TLS_AT_DESTINATION)
                await _refuse(control, TlsMismatch(TLS_AT_DESTINATION))
        finally:
            control.abort()


async def _refuse(control: ControlConnection, error: ServingError) -> None:
    refusal = pb.LinkRefusal(error_type=wire_name(error), error=error.message)
    with suppress(PeerLost):
        await control.write(pb.LinkReply(refusal=refusal))
    await control.finish()


async def _peek(connected: socket.socket) -> bytes:
    """The first bytes that come, which stay to be received. Raises: OSError."""
    loop, has_come = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connected, has_come.set)
    try:
        await has_come.wait()
    finally:
        loop.remove_reader(connected)
    return connected.recv(len(TLS_BEGINNINGS[0]), socket.MSG_PEEK)


async def _receive(connected: socket.socket, num_bytes: int) -> bytes:
    """Raises: PeerLost, OSError."""
    received = b""
    while len(received) < num_bytes:
        more = await asyncio.get_running_loop().sock_recv(connected, num_bytes - len(received))
        if not more:
            raise PeerLost("it has left")
        received += more
    return received
