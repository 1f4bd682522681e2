"""Payloads beside the control stream, written by NIXL into a window that the destination lends for the link's life.

    source         own ring ── write ──▶ window          a ring at the same places on both sides, freed by credit
    destination               window ── copy, hash ──▶ staging memory that no peer can reach

The header goes first: it says where the piece will lie, and over TCP a write moves only while its target waits for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from common.errors import ConfigError, PeerLost
from common.pb import kv_transfer_pb2 as pb
from kv_transfer.inline import pack_on_host
from kv_transfer.link import Landing, PackedPayload, ReceivedPayload
from kv_transfer.nixl_agent import MemoryInDoubt
from kv_transfer.nixl_window import NixlTarget, NixlWriter, Window
from kv_transfer.staging import Staged, StagingRing, ring_bytes, staged_bytes
from kv_transfer.stream_channel import NextRequest, WriteRequest
from kv_transfer.transport import TransferStats
from kv_transfer.wire import PieceHeader, checksum_of

logger = logging.getLogger(__name__)

PAYLOAD_TIMEOUT_S = 10.0  # one piece; longer than this, the peer is frozen

Result = TypeVar("Result")


class NixlSource:
    name = "nixl"

    def __init__(self, host: str, stats: TransferStats) -> None:
        """host: the destination's."""
        self._net_device = _net_device(host)
        self._thread = _AgentThread(stats)
        self._placed: deque[Staged] = deque()  # the destination may still read them, oldest first

    async def attach(self, welcome: pb.LinkWelcome, write: WriteRequest) -> None:
        memory = torch.empty(ring_bytes(welcome.credit_bytes), dtype=torch.uint8)
        self._ring = StagingRing(memory, on_freed=lambda num_bytes: None)
        window = Window.decode(welcome.nixl_metadata)
        self._writer = await self._thread.make(partial(NixlWriter, window, memory, self._net_device))

    async def pack(self, flat: Tensor) -> PackedPayload:
        return await pack_on_host(flat)

    async def put(self, piece: pb.Piece, flat: Tensor) -> None:
        place = self._ring.take(flat.numel())
        self._placed.append(place)
        piece.offset = place.offset

    async def push(self, flat: Tensor) -> None:
        await self._thread.run(partial(self._write, flat, self._placed[-1]))

    def on_credit(self, num_bytes: int) -> None:
        """Credit comes in whole pieces, oldest first."""
        while num_bytes > 0:
            place = self._placed.popleft()
            num_bytes -= staged_bytes(place.flat.numel())
            place.release()

    async def close(self) -> None:
        self._thread.close()

    def _write(self, flat: Tensor, place: Staged) -> None:
        place.flat.copy_(flat)
        self._writer.write(place.flat, place.offset, b"piece", PAYLOAD_TIMEOUT_S)


class NixlDestination:
    name = "nixl"
    max_ahead = 1

    def __init__(self, stats: TransferStats, host: str) -> None:
        """host: this worker's own."""
        self._net_device = _net_device(host)
        self._thread = _AgentThread(stats)

    async def prepare(self, welcome: pb.LinkWelcome, landing: Landing) -> None:
        self._landing = landing
        self._memory = torch.empty(ring_bytes(welcome.credit_bytes), dtype=torch.uint8)
        self._target = await self._thread.make(partial(NixlTarget, self._memory, self._net_device))
        welcome.nixl_metadata = self._target.window.encode()

    async def attach(self, read: NextRequest) -> None:
        pass

    async def receive(self, header: PieceHeader, piece: pb.Piece) -> ReceivedPayload:
        if piece.offset + header.num_bytes > self._memory.numel():
            raise PeerLost(f"a piece of {header.num_bytes} bytes at {piece.offset} is outside of the window")
        staged = self._landing.staging.take(header.num_bytes)
        return ReceivedPayload(staged, await self._thread.run(partial(self._receive, staged.flat, piece.offset)))

    async def close(self) -> None:
        self._thread.close()

    def _receive(self, flat: Tensor, offset: int) -> int:
        if self._target.wait(PAYLOAD_TIMEOUT_S) is None:
            raise PeerLost(f"a piece that was announced has not come within {PAYLOAD_TIMEOUT_S} s")
        flat.copy_(self._memory[offset : offset + flat.numel()])
        return checksum_of(flat)


Agent = TypeVar("Agent", NixlWriter, NixlTarget)


class _AgentThread:
    """The one thread that a link's agent lives on, from its start to the proof that its memory is free."""

    def __init__(self, stats: TransferStats) -> None:
        self._stats = stats
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-nixl")
        self._agent: NixlWriter | NixlTarget | None = None
        self._is_closed = False

    async def make(self, new_agent: Callable[[], Agent]) -> Agent:
        """Raises: PeerLost also when this host cannot."""
        try:
            agent = await self.run(new_agent)
        except ConfigError as error:
            raise PeerLost(str(error)) from error
        self._agent = agent
        return agent

    async def run(self, call: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)

    def close(self) -> None:
        """Wake the thread if it waits, and end the agent there. Safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._agent is not None:
            self._agent.abort()
        self._executor.submit(self._end)
        self._executor.shutdown(wait=False)

    def _end(self) -> None:
        if self._agent is None:
            return
        try:
            self._agent.close()
        except MemoryInDoubt:
            logger.exception("NIXL may still write into a link's memory, which is kept for ever")
            self._stats.quarantined.append(self._agent)
        self._agent = None


def _net_device(host: str) -> str | None:
    """UCX listens on every interface unless it is told one."""
    is_loopback = host.startswith("127.") or host in ("localhost", "[::1]", "::1")
    return "lo" if is_loopback else None
