"""The seams of a link, which every kind of transport fills in: a channel at either end.

A link is one long-lived connection between two processes. It carries every transfer between them, interleaved:

    source → hello   ← challenge   → proof   ← welcome   (pieces, commits and aborts →   ← credits and verdicts)*

A channel keeps frames in order, and hands a piece over together with its payload. On a link every attempt ends with a
commit or an abort from the source, so the destination can forget it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from common.kv_layout import KVLayout
from common.pb import kv_transfer_pb2 as pb
from kv_transfer.codec import PieceCodec
from kv_transfer.heads import HeadRange
from kv_transfer.staging import Staged, Staging
from kv_transfer.wire_dtype import WireDtype


@dataclass(frozen=True)
class Endpoint:
    """Who this process is to its peers."""

    layout: KVLayout
    incarnation: str
    heads: HeadRange  # of the layout's KV heads, those that this process holds
    secret: bytes = field(default=b"", repr=False)  # the cluster's; both ends prove that they know it
    wire_dtype: WireDtype = WireDtype.SAME


@dataclass(frozen=True)
class PackedPayload:
    """A payload ready to leave. flat: [num_bytes] uint8, where the channel wants it."""

    flat: Tensor
    checksum: int | None  # None: the channel takes it as the piece leaves


class SourceChannel(Protocol):
    """The source's end. Calls of one kind never overlap. A lost or refusing peer shows as a ServingError."""

    @property
    def wire_name(self) -> str:
        """Transport and whatever both ends must have in common beyond it: "grpc", "torch_dist/gloo"."""

    async def pack(self, flat: Tensor) -> PackedPayload:
        """Of [num_bytes] uint8, on any device."""

    async def write(self, request: pb.LinkRequest, payload: Tensor | None = None) -> None:
        """May return before the payload has been read, which nobody changes meanwhile. Connects on the first call."""

    async def read(self) -> pb.LinkReply:
        """The next reply. Raises: PeerLost also when the destination ends the link in peace."""

    async def attach(self, welcome: pb.LinkWelcome) -> None:
        """Connect whatever payloads travel on, before the first piece. Raises: PeerLost."""

    async def close(self) -> None:
        """Safe to call twice."""


@dataclass(frozen=True)
class ReceivedPayload:
    """Staging memory and the checksum of what really lies there."""

    staged: Staged
    checksum: int


@dataclass(frozen=True)
class Arrival:
    request: pb.LinkRequest
    payload: ReceivedPayload | None = None  # exactly with a piece


@dataclass(frozen=True)
class Landing:
    """Where one link's payloads go, and how many bytes a header may rightly announce."""

    staging: Staging
    codec: PieceCodec


class DestinationChannel(Protocol):
    """The destination's end. Calls of one kind never overlap."""

    @property
    def wire_name(self) -> str: ...

    async def read(self) -> Arrival:
        """The next frame; a piece's payload is staged, wanted or not.

        Raises: PeerLost at the end of the link, StagingOverrun.
        """

    async def write(self, reply: pb.LinkReply) -> None: ...

    def trust(self) -> None:
        """The source has proved itself, or need not: from now on it may be told why it is refused."""

    async def prepare(self, welcome: pb.LinkWelcome, landing: Landing) -> None:
        """Open whatever payloads will come by, and say in the welcome where."""

    async def attach(self) -> None:
        """Meet the source there, the welcome being written. Raises: PeerLost."""

    async def close(self) -> None:
        """Nothing writes into staging memory once this has returned. Safe to call twice."""


Serve = Callable[[DestinationChannel], Awaitable[None]]  # a link from its hello to its end; closes the channel


class Listener(Protocol):
    """A place where sources reach a receiver over one transport."""

    @property
    def transport(self) -> str: ...

    async def open(self, worker_address: str, serve: Serve) -> str:
        """Listen on the host of worker_address, serve each source that comes, and return the address to offer."""

    async def close(self) -> None:
        """Nobody new. Safe to call twice."""


@dataclass(frozen=True)
class Way:
    """How a source reaches destinations over one transport."""

    transport: str
    dial: Callable[[str], SourceChannel]  # to an offer's address; connects on the first write
    max_piece_bytes: int | None = None  # the largest aim that pays, if there is such a size
    piece_round_trips: float = 0.5  # what each piece costs beyond its bytes
