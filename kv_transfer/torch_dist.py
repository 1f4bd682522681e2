"""Payloads beside the control stream, over the link's own torch.distributed pair.

    source   ── header 1, header 2, ... ──▶   over the stream, each before its payload
             ══ payload 1, payload 2, ... ═▶  over the pair, in the same order: a receive is posted as soon as its
                                              header is read, whatever is still on its way before it

A dead pair is never mended: its link ends, and the next `open` makes a new link with a new pair.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from common.errors import PeerLost
from common.pb import kv_transfer_pb2 as pb
from kv_transfer.link import Landing, PackedPayload, ReceivedPayload
from kv_transfer.pair_meeting import PairMeeting
from kv_transfer.pair_threads import PairThreads
from kv_transfer.side_stream import copy_to_host
from kv_transfer.stream_channel import NextRequest, WriteRequest
from kv_transfer.torch_pair import DESTINATION, SOURCE, Tokens, own_address_towards, resolve
from kv_transfer.wire import PieceHeader, checksum_of

PAYLOAD_TIMEOUT_S = 10.0  # one piece; longer than this, the peer is frozen
MAX_MOVING = 8  # payloads: fewer, and the pair idles while threads switch
_TOKEN_BYTES = 16


def channel_for(device: torch.device) -> str:
    """The 2: ends that meet through the link's stream; the first ones met through a store with a port of its own."""
    return "nccl/2" if device.type == "cuda" else "gloo/2"


class TorchDistSource:
    def __init__(self, device: torch.device, host: str) -> None:
        """host: the destination's."""
        self.name = channel_for(device)
        self._threads = PairThreads(PAYLOAD_TIMEOUT_S)
        self._meeting = PairMeeting(self._threads, SOURCE, device, partial(own_address_towards, host))
        self._moving: deque[asyncio.Future[None]] = deque()

    async def attach(self, welcome: pb.LinkWelcome, write: WriteRequest) -> None:
        self._meeting.hear(welcome.pair)
        entry = await self._meeting.begin(Tokens(welcome.source_token, welcome.destination_token))
        await write(pb.LinkRequest(join=pb.LinkJoin(pair=entry)))
        await self._meeting.complete()

    async def pack(self, flat: Tensor) -> PackedPayload:
        on_cpu = await asyncio.to_thread(copy_to_host, flat) if flat.is_cuda else flat
        return PackedPayload(flat, checksum_of(on_cpu))

    async def put(self, piece: pb.Piece, flat: Tensor) -> None:
        pass

    async def push(self, flat: Tensor) -> None:
        if len(self._moving) == MAX_MOVING:
            await self._moving.popleft()
        self._moving.append(self._threads.move(lambda pair: pair.send(flat), lambda: None))

    def on_credit(self, num_bytes: int) -> None:
        pass

    async def close(self) -> None:
        """A push that failed has killed the pair on both sides, so the link's reader knows already."""
        self._meeting.close()
        self._threads.close()
        while self._moving:
            with suppress(PeerLost):
                await self._moving.popleft()


class TorchDistDestination:
    max_ahead = MAX_MOVING

    def __init__(self, device: torch.device, host: str) -> None:
        """host: this worker's own, where the pair meets."""
        self.name = channel_for(device)
        self._threads = PairThreads(PAYLOAD_TIMEOUT_S)
        self._meeting = PairMeeting(self._threads, DESTINATION, device, partial(resolve, host))

    async def prepare(self, welcome: pb.LinkWelcome, landing: Landing) -> None:
        self._landing = landing
        tokens = Tokens(secrets.token_bytes(_TOKEN_BYTES), secrets.token_bytes(_TOKEN_BYTES))
        welcome.pair.CopyFrom(await self._meeting.begin(tokens))
        welcome.source_token, welcome.destination_token = tokens.source, tokens.destination

    async def attach(self, read: NextRequest) -> None:
        request = await read()
        if not request.HasField("join"):
            raise PeerLost(f"the source sends {request.WhichOneof('frame')} where it should join the pair")
        self._meeting.hear(request.join.pair)
        await self._meeting.complete()

    def receive(self, header: PieceHeader, piece: pb.Piece) -> asyncio.Future[ReceivedPayload]:
        """A wrong size could not be drained, and a buffer smaller than what comes kills this process: better to lose
        the link."""
        expected = self._landing.codec.num_bytes(header)
        if header.num_bytes != expected or expected <= 0:
            raise PeerLost(f"a piece announces {header.num_bytes} bytes where its range takes {expected}")
        staged = self._landing.staging.take(expected)

        def hashed() -> ReceivedPayload:
            flat = staged.flat
            return ReceivedPayload(staged, checksum_of(copy_to_host(flat) if flat.is_cuda else flat))

        return self._threads.move(lambda pair: pair.receive(staged.flat), hashed)

    async def close(self) -> None:
        self._meeting.close()
        self._threads.close()
