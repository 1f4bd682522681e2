"""The seams of a link, which every kind of transport fills in: how control frames travel, and how payload bytes do.

A link is one long-lived stream between two processes. It carries every transfer between them, interleaved, in order:

    source → hello   ← welcome   (pieces, commits and aborts →   ← verdicts)*

On a link every attempt ends with a commit or an abort from the source, so the destination can forget it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from common.kv_layout import KVLayout
from common.pb import kv_transfer_pb2 as pb
from kv_transfer.transport import Destination
from kv_transfer.wire import PieceHeader


@dataclass(frozen=True)
class Endpoint:
    """Who this process is to its peers."""

    transport: str  # as in the config and in Destination: "grpc", "torch_dist", "loopback"
    channel: str  # how payloads travel: "inline", "gloo", "nccl"; both ends must use the same
    layout: KVLayout
    incarnation: str

    @property
    def wire_name(self) -> str:
        return f"{self.transport}/{self.channel}"


class LinkStream(Protocol):
    """The source's end of the control stream. A lost or refusing peer shows as a ServingError."""

    async def write(self, request: pb.LinkRequest) -> None: ...

    async def read(self) -> pb.LinkReply:
        """The next reply. Raises: PeerLost also when the destination ends the stream in peace."""

    async def close(self) -> None:
        """Safe to call twice."""


Dial = Callable[[Destination], LinkStream]  # connects on the first write
Reply = Callable[[pb.LinkReply], Awaitable[None]]  # the destination's end of the control stream


@dataclass(frozen=True)
class Rendezvous:
    """Where the two ends of a payload channel meet; empty when payloads travel inline."""

    store_address: str = ""
    group_name: str = ""


@dataclass(frozen=True)
class PackedPayload:
    """A payload ready to leave: its checksum, and its bytes if they travel inside the piece."""

    checksum: int
    inline: bytes = b""


class PayloadSource(Protocol):
    """The source's end of one link's payload channel. Calls never overlap."""

    async def connect(self, rendezvous: Rendezvous) -> None:
        """Raises: PeerLost."""

    async def pack(self, flat: Tensor) -> PackedPayload:
        """Hash [num_bytes] uint8, on any device."""

    async def push(self, flat: Tensor) -> None:
        """Send what does not travel inline, in the order of the calls; may return before it is sent.

        The piece's header has been written. Raises: PeerLost, for this payload or an earlier one.
        """

    async def close(self) -> None:
        """Safe to call twice."""


@dataclass(frozen=True)
class ReceivedPayload:
    """[num_bytes] uint8 that nobody else holds, and the checksum of what really arrived."""

    flat: Tensor
    checksum: int


class PayloadDestination(Protocol):
    """The destination's end of one link's payload channel. Calls never overlap, apart from close."""

    async def prepare(self, host: str) -> Rendezvous:
        """Open the meeting point on this host's address."""

    async def connect(self) -> None:
        """Meet the source. Raises: PeerLost."""

    async def receive(self, header: PieceHeader, message: pb.Piece) -> ReceivedPayload:
        """Take in the payload, wanted or not. Raises: PeerLost when the channel cannot go on."""

    async def close(self) -> None: ...
