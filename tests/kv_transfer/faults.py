"""Everything that a broken transport, or a death at a bad moment, can do to a link: channels that misbehave by a plan.

    source ──FaultySource──▶ the real channel, of any kind ──FaultyDestination──▶ receiver

Frames are spoiled above the real channel, so that the same faults fit every kind. A death is told to whoever owns the
process: the channel that notices it says nothing more, as a killed process would not.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from random import Random
from typing import TypeVar

from google.protobuf.message import DecodeError
from torch import Tensor

from common.errors import PeerLost
from common.pb import kv_transfer_pb2 as pb
from kv_transfer.link import Arrival, DestinationChannel, Landing, PackedPayload, ReceivedPayload, SourceChannel
from kv_transfer.staging import StagingRing
from kv_transfer.wire import PROBE_ID, checksum_of

MAX_DELAY_S = 0.01
Frame = TypeVar("Frame", pb.LinkRequest, pb.LinkReply)


class Fault(StrEnum):
    DELAY = "delay"
    DROP = "drop"
    DUPLICATE = "duplicate"
    REORDER = "reorder"  # the frame comes after the one that follows it
    REPLAY = "replay"  # an earlier frame comes again, perhaps of another transfer, link or process
    TRUNCATE = "truncate"
    FLIP_PAYLOAD = "flip payload"
    FLIP_HEADER = "flip header"
    CUT = "cut"  # the connection breaks
    KILL_SOURCE = "kill source"
    KILL_DESTINATION = "kill destination"


FRAME_FAULTS = (Fault.DELAY, Fault.DROP, Fault.DUPLICATE, Fault.REORDER, Fault.REPLAY, Fault.FLIP_HEADER)
PAYLOAD_FAULTS = (Fault.TRUNCATE, Fault.FLIP_PAYLOAD)  # the second one at the destination: sources hash what they send
HANDSHAKE = ("hello", "challenge", "proof", "welcome")
POINTS = (*HANDSHAKE, "piece", "commit", "commit_result", "credit")

# A link is made of four frames and measured with dozens; at the full rate few would ever carry a transfer.
HANDSHAKE_SHARE = 0.25
PROBE_SHARE = 0.01


@dataclass
class Armed:
    fault: Fault
    point: str
    num_spared: int


@dataclass
class FaultPlan:
    """Which fault happens to which frame: those that a test has armed, first come first served, then by chance."""

    random: Random
    rates: Mapping[Fault, float] = field(default_factory=dict)  # for each frame that the fault can happen to
    happened: Counter[tuple[Fault, str]] = field(default_factory=Counter)
    armed: list[Armed] = field(default_factory=list)

    def arm(self, fault: Fault, point: str, num_spared: int = 0) -> None:
        """Once, to a frame of this kind after num_spared others, the measuring of links apart."""
        self.armed.append(Armed(fault, point, num_spared))

    def draw(self, point: str, possible: tuple[Fault, ...], *, is_probe: bool) -> Fault | None:
        fault = self._draw(point, possible, is_probe)
        if fault is not None:
            self.happened[fault, point] += 1
        return fault

    def _draw(self, point: str, possible: tuple[Fault, ...], is_probe: bool) -> Fault | None:
        for armed in list(self.armed):
            if armed.point == point and armed.fault in possible and not is_probe:
                armed.num_spared -= 1
                if armed.num_spared < 0:
                    self.armed.remove(armed)
                    return armed.fault
        chance = self.random.random() / (PROBE_SHARE if is_probe else HANDSHAKE_SHARE if point in HANDSHAKE else 1.0)
        for fault in possible:
            chance -= self.rates.get(fault, 0.0)
            if chance < 0:
                return fault
        return None


class FaultySource:
    """A SourceChannel. on_death: the process at this end is to die, now."""

    def __init__(self, inner: SourceChannel, plan: FaultPlan, past: Past, on_death: Callable[[], None]) -> None:
        self._inner = inner
        self._plan = plan
        self._past = past
        self._on_death = on_death
        self._held: _Request | None = None
        self._has_begun = asyncio.Event()
        self._is_attached = False
        self._is_broken = False

    @property
    def wire_name(self) -> str:
        return self._inner.wire_name

    async def pack(self, flat: Tensor) -> PackedPayload:
        return await self._inner.pack(flat)

    async def attach(self, welcome: pb.LinkWelcome) -> None:
        await self._inner.attach(welcome)
        self._is_attached = True

    async def close(self) -> None:
        await self._inner.close()

    async def write(self, request: pb.LinkRequest, payload: Tensor | None = None) -> None:
        self._require_whole()
        possible = (*FRAME_FAULTS, *([Fault.TRUNCATE] if payload is not None else []), Fault.CUT, Fault.KILL_SOURCE)
        fault = self._plan.draw(_kind(request), possible, is_probe=_is_probe(request))
        await self._break(fault)
        frame = _Request(_copy(request), payload)
        held, self._held = self._held, None
        for passed in await self._spoiled(fault, frame):
            await self._inner.write(_copy(passed.request), passed.payload)
            self._past.note(passed)
            self._has_begun.set()
        if held is not None:
            await self._inner.write(held.request, held.payload)

    async def read(self) -> pb.LinkReply:
        self._require_whole()
        await self._has_begun.wait()  # no answer to a hello that got lost
        reply = await self._inner.read()
        await self._break(self._plan.draw(_kind(reply), (Fault.CUT, Fault.KILL_SOURCE), is_probe=_is_probe(reply)))
        return reply

    async def _spoiled(self, fault: Fault | None, frame: _Request) -> list[_Request]:
        """What comes out in its place."""
        random = self._plan.random
        match fault:
            case Fault.DELAY:
                await asyncio.sleep(random.random() * MAX_DELAY_S)
            case Fault.DROP:
                return []
            case Fault.DUPLICATE:
                return [frame, frame]
            case Fault.REORDER:
                self._held = frame
                return []
            case Fault.REPLAY:
                return [self._past.any_of(random, frame), frame] if self._is_attached else [frame, frame]
            case Fault.FLIP_HEADER:
                flipped = _with_a_bit_flipped(frame.request, random)
                return [_Request(flipped, frame.payload if flipped.HasField("piece") else None)]
            case Fault.TRUNCATE:
                assert frame.payload is not None
                return [_Request(frame.request, frame.payload[: random.randrange(frame.payload.numel())])]
        return [frame]

    async def _break(self, fault: Fault | None) -> None:
        if fault is Fault.KILL_SOURCE:
            self._on_death()
        if fault in (Fault.CUT, Fault.KILL_SOURCE):
            self._is_broken = True
            await self._inner.close()
        self._require_whole()

    def _require_whole(self) -> None:
        if self._is_broken:
            raise PeerLost("the connection broke")


class Staging:
    """The staging memory of one receiver's links, and what of it is lent out; a dead link takes its own with it."""

    def __init__(self) -> None:
        self.live: set[StagingRing] = set()
        self._lock = threading.Lock()
        self._num_lent = 0

    @property
    def leaks(self) -> list[str]:
        """Ask when nothing is under way."""
        taken = sum(ring.num_taken_bytes for ring in self.live)
        return [f"{taken} bytes staged, {self._num_lent} pieces lent"] if taken or self._num_lent else []

    def lend(self, arrival: Arrival) -> Arrival:
        """The same, counted until it is released."""
        if arrival.payload is None:
            return arrival
        staged = arrival.payload.staged
        self._count(+1)

        def release() -> None:
            self._count(-1)
            staged.release()

        return replace(arrival, payload=replace(arrival.payload, staged=replace(staged, release=release)))

    def _count(self, change: int) -> None:
        with self._lock:
            self._num_lent += change


class FaultyDestination:
    """A DestinationChannel."""

    def __init__(
        self, inner: DestinationChannel, plan: FaultPlan, staging: Staging, on_death: Callable[[], None]
    ) -> None:
        self._inner = inner
        self._plan = plan
        self._staging = staging
        self._ring: StagingRing | None = None
        self._on_death = on_death
        self._held: pb.LinkReply | None = None

    @property
    def wire_name(self) -> str:
        return self._inner.wire_name

    def trust(self) -> None:
        self._inner.trust()

    async def prepare(self, welcome: pb.LinkWelcome, landing: Landing) -> None:
        assert isinstance(landing.staging, StagingRing)
        self._ring = landing.staging
        self._staging.live.add(self._ring)
        await self._inner.prepare(welcome, landing)

    async def attach(self) -> None:
        await self._inner.attach()

    async def close(self) -> None:
        if self._ring is not None:
            self._staging.live.discard(self._ring)
        await self._inner.close()

    async def read(self) -> Arrival:
        arrival = self._staging.lend(await self._inner.read())
        request, payload = arrival.request, arrival.payload
        has_bits = payload is not None and payload.staged.flat.numel() > 0
        possible = (*([Fault.FLIP_PAYLOAD] if has_bits else []), Fault.CUT, Fault.KILL_DESTINATION)
        fault = self._plan.draw(_kind(request), possible, is_probe=_is_probe(request))
        if fault is Fault.FLIP_PAYLOAD:
            assert payload is not None
            return replace(
                arrival, payload=flipped(payload, self._plan.random.randrange(8 * payload.staged.flat.numel()))
            )
        if fault is not None and payload is not None:
            payload.staged.release()  # nobody else will ever hear of it
        self._break(fault)
        return arrival

    async def write(self, reply: pb.LinkReply) -> None:
        possible = (*FRAME_FAULTS, Fault.CUT, Fault.KILL_DESTINATION)
        fault = self._plan.draw(_kind(reply), possible, is_probe=_is_probe(reply))
        self._break(fault)
        held, self._held = self._held, None
        for passed in await self._spoiled(fault, reply):
            await self._inner.write(passed)
        if held is not None:
            await self._inner.write(held)

    async def _spoiled(self, fault: Fault | None, reply: pb.LinkReply) -> list[pb.LinkReply]:
        match fault:
            case Fault.DELAY:
                await asyncio.sleep(self._plan.random.random() * MAX_DELAY_S)
            case Fault.DROP:
                return []
            case Fault.DUPLICATE | Fault.REPLAY:
                return [reply, reply]
            case Fault.REORDER:
                self._held = reply
                return []
            case Fault.FLIP_HEADER:
                return [_with_a_bit_flipped(reply, self._plan.random)]
        return [reply]

    def _break(self, fault: Fault | None) -> None:
        if fault is Fault.KILL_DESTINATION:
            self._on_death()
        if fault in (Fault.CUT, Fault.KILL_DESTINATION):
            raise PeerLost("the connection broke")


def flipped(payload: ReceivedPayload, bit: int) -> ReceivedPayload:
    """As if the bit had flipped on the way, before the destination hashed what came."""
    payload.staged.flat[bit // 8] ^= 1 << bit % 8
    return replace(payload, checksum=checksum_of(payload.staged.flat))


class Past:
    """The last frames that sources wrote, on whichever link."""

    def __init__(self) -> None:
        self._frames: deque[_Request] = deque(maxlen=32)

    def note(self, frame: _Request) -> None:
        if not _is_probe(frame.request):
            self._frames.append(frame)

    def any_of(self, random: Random, default: _Request) -> _Request:
        return random.choice(self._frames) if self._frames else default


@dataclass(frozen=True)
class _Request:
    request: pb.LinkRequest
    payload: Tensor | None


def _kind(frame: pb.LinkRequest | pb.LinkReply) -> str:
    return frame.WhichOneof("frame") or "nothing"


def _is_probe(frame: pb.LinkRequest | pb.LinkReply) -> bool:
    match _kind(frame):
        case "piece" | "commit" | "abort" | "commit_result" | "ended" as kind:
            ticket: pb.Ticket = getattr(frame, kind).ticket
            return ticket.transfer_id == PROBE_ID
    return False


def _copy(request: pb.LinkRequest) -> pb.LinkRequest:
    """Channels put payloads and places into the message that they are given."""
    copy = pb.LinkRequest()
    copy.CopyFrom(request)
    return copy


def _with_a_bit_flipped(frame: Frame, random: Random) -> Frame:
    """Raises: PeerLost if that is no frame any more."""
    flipped = bytearray(frame.SerializeToString())
    if flipped:
        flipped[random.randrange(len(flipped))] ^= 1 << random.randrange(8)
    try:
        return type(frame).FromString(bytes(flipped))
    except DecodeError:
        raise PeerLost("the connection broke over a frame that cannot be read") from None
