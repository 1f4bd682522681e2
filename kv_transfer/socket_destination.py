"""The destination's end of a link over sockets: control on the event loop, each data connection on its thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from common.errors import PeerLost, ServingError
from common.pb import kv_transfer_pb2 as pb
from kv_transfer.control_connection import ControlConnection
from kv_transfer.data_connection import DataConnection, socket_errors
from kv_transfer.frame_queue import FrameQueue
from kv_transfer.link import Arrival, Landing
from kv_transfer.link_thread import LinkThread
from kv_transfer.meeting_point import Meeting, MeetingPoint
from kv_transfer.socket_medium import Medium, PayloadReceiver

_TURN = 16  # frames handled before others on the event loop have theirs


@dataclass(frozen=True)
class _Read:
    connection: int
    arrival: Arrival


class SocketDestination:
    """A DestinationChannel. The control connection is the listener's, which may have a refusal to write at the end."""

    def __init__(
        self, medium: Medium, control: ControlConnection, meeting_point: MeetingPoint, on_trusted: Callable[[], None]
    ) -> None:
        self.wire_name = medium.transport
        self.is_trusted = False
        self._medium = medium
        self._control = control
        self._meeting_point = meeting_point
        self._on_trusted = on_trusted
        self._meeting: Meeting | None = None
        self._payloads: PayloadReceiver | None = None
        self._receivers: list[_DataReceiver] = []
        self._incoming: FrameQueue[_Read | ServingError] = FrameQueue()
        self._num_read = 0
        self._fences = _Fences(medium.num_connections)
        self._watch: asyncio.Task[None] | None = None

    def trust(self) -> None:
        self.is_trusted = True
        self._on_trusted()

    async def read(self) -> Arrival:
        """Up to `attach` from the control connection, then from the data connections."""
        if self._watch is None:
            return Arrival(await self._control.read(pb.LinkRequest))
        while True:
            self._num_read += 1
            if self._num_read % _TURN == 0:
                await asyncio.sleep(0)
            incoming = await self._incoming.get()
            if isinstance(incoming, ServingError):
                raise incoming
            if incoming.arrival.payload is not None or self._fences.pass_through(incoming.connection):
                return incoming.arrival

    async def write(self, reply: pb.LinkReply) -> None:
        await self._control.write(reply)

    async def prepare(self, welcome: pb.LinkWelcome, landing: Landing) -> None:
        self._payloads = self._medium.new_receiver(landing)
        self._meeting = self._meeting_point.expect(self._medium.num_connections)
        welcome.data_token = self._meeting.token
        welcome.num_connections = self._medium.num_connections

    async def attach(self) -> None:
        assert self._meeting is not None, "prepare comes first"
        assert self._payloads is not None, "prepare comes first"
        self._watch = asyncio.create_task(self._watch_control(self._meeting), name=f"kv-watch-{self.wire_name}")
        for number in range(self._medium.num_connections):
            connection = DataConnection(await self._meeting.next())
            receiver = _DataReceiver(number, connection, self._payloads, self._incoming)
            self._receivers.append(receiver)

    async def close(self) -> None:
        if self._meeting is not None:
            self._meeting.end()
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])
        for receiver in self._receivers:
            receiver.end()
        for receiver in self._receivers:
            await receiver.join()
        self._incoming.close()
        if self._payloads is not None:
            self._payloads.close()
            self._payloads = None

    async def _watch_control(self, meeting: Meeting) -> None:
        """The source says nothing more there, but its end is the link's end."""
        try:
            await self._control.read(pb.LinkRequest)
            lost = PeerLost("the source writes where it should not")
        except PeerLost as error:
            lost = error
        meeting.end()
        self._incoming.put(lost)


class _Fences:
    """Commits and aborts come on every data connection, and count when they have come on the last one."""

    def __init__(self, num_connections: int) -> None:
        self._num_seen = [0] * num_connections

    def pass_through(self, connection: int) -> bool:
        before = min(self._num_seen)
        self._num_seen[connection] += 1
        return min(self._num_seen) > before


class _DataReceiver:
    """One data connection and its thread, which stages and hashes what comes."""

    def __init__(
        self,
        number: int,
        connection: DataConnection,
        payloads: PayloadReceiver,
        incoming: FrameQueue[_Read | ServingError],
    ) -> None:
        self._number = number
        self._connection = connection
        self._payloads = payloads
        self._incoming = incoming
        self._thread = LinkThread(f"kv-receive-{number}", self._run)

    def end(self) -> None:
        self._connection.end()

    async def join(self) -> None:
        """After `end`. Nothing writes into staging memory once this has returned."""
        await self._thread.join()
        self._connection.close()

    def _run(self) -> None:
        try:
            with socket_errors():
                self._payloads.meet(self._connection)
                while True:
                    self._incoming.put(_Read(self._number, self._receive()))
        except ServingError as lost:
            self._incoming.put(lost)

    def _receive(self) -> Arrival:
        request, payload_bytes = self._connection.receive_frame()
        if request.HasField("piece"):
            return Arrival(request, self._payloads.receive(self._connection, request.piece, payload_bytes))
        if payload_bytes > 0:
            raise PeerLost("the source sends a payload without a piece")
        return Arrival(request)
