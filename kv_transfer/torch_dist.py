"""Payloads beside the control stream, over the link's own torch.distributed pair.

A dead pair is never mended: its link ends, and the next `open` makes a new link with a new pair under a fresh name.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from common.errors import PeerLost
from common.pb import kv_transfer_pb2 as pb
from kv_transfer.link import Landing, PackedPayload, ReceivedPayload
from kv_transfer.side_stream import copy_to_host
from kv_transfer.torch_pair import DESTINATION, SOURCE, Pair, host_store, join_store, make_pair
from kv_transfer.wire import PieceHeader, checksum_of

CONNECT_TIMEOUT_S = 5.0
PAYLOAD_TIMEOUT_S = 10.0  # one piece; longer than this, the peer is frozen
MAX_PUSHES = 4

Result = TypeVar("Result")


def channel_for(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


class TorchDistSource:
    def __init__(self, device: torch.device) -> None:
        self.name = channel_for(device)
        self._device = device
        self._thread = PairThread()
        self._pushes: deque[asyncio.Task[None]] = deque()

    async def attach(self, welcome: pb.LinkWelcome) -> None:
        await self._thread.run(partial(self._join, welcome))

    async def pack(self, flat: Tensor) -> PackedPayload:
        on_cpu = await asyncio.to_thread(copy_to_host, flat) if flat.is_cuda else flat
        return PackedPayload(flat, checksum_of(on_cpu))

    async def put(self, piece: pb.Piece, flat: Tensor) -> None:
        pass

    async def push(self, flat: Tensor) -> None:
        """Several payloads are under way, or each would pay for two thread switches and a round of the event loop."""
        if len(self._pushes) == MAX_PUSHES:
            await self._pushes.popleft()
        send = partial(self._thread.pair.send, flat, PAYLOAD_TIMEOUT_S)
        self._pushes.append(asyncio.create_task(self._thread.run(send), name="kv-push"))

    def on_credit(self, num_bytes: int) -> None:
        pass

    async def close(self) -> None:
        """A push that failed has killed the pair on both sides, so the link's reader knows already."""
        self._thread.close()
        while self._pushes:
            with suppress(PeerLost):
                await self._pushes.popleft()

    def _join(self, welcome: pb.LinkWelcome) -> None:
        self._thread.store, own_address = join_store(welcome.store_address, CONNECT_TIMEOUT_S)
        self._thread.meet(welcome.group_name, SOURCE, own_address, self._device)


class TorchDistDestination:
    def __init__(self, device: torch.device, host: str) -> None:
        """host: this worker's own, where the pair meets."""
        self.name = channel_for(device)
        self._device = device
        self._host = host
        self._thread = PairThread()

    async def prepare(self, welcome: pb.LinkWelcome, landing: Landing) -> None:
        self._landing = landing
        welcome.store_address = await self._thread.run(self._open_store)
        welcome.group_name = self._group_name = secrets.token_hex(8)
        self._own_address = welcome.store_address.rpartition(":")[0]

    async def attach(self) -> None:
        meet = partial(self._thread.meet, self._group_name, DESTINATION, self._own_address, self._device)
        await self._thread.run(meet)

    async def receive(self, header: PieceHeader, piece: pb.Piece) -> ReceivedPayload:
        """A wrong size could not be drained, and a buffer smaller than what comes kills this process: better to lose
        the link."""
        expected = self._landing.codec.num_bytes(header)
        if header.num_bytes != expected or expected <= 0:
            raise PeerLost(f"a piece announces {header.num_bytes} bytes where its range takes {expected}")
        staged = self._landing.staging.take(expected)
        return ReceivedPayload(staged, await self._thread.run(partial(self._receive, staged.flat)))

    async def close(self) -> None:
        self._thread.close()

    def _open_store(self) -> str:
        self._thread.store, store_address = host_store(self._host, CONNECT_TIMEOUT_S)
        return store_address

    def _receive(self, flat: Tensor) -> int:
        self._thread.pair.receive(flat, PAYLOAD_TIMEOUT_S)
        return checksum_of(flat.cpu())


class PairThread:
    """The one thread that a link's pair lives on: made, used and let go there, so the event loop never waits."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-pair")
        self.store: Store | None = None
        self._pair: Pair | None = None
        self._is_closed = False

    @property
    def pair(self) -> Pair:
        assert self._pair is not None, "connect comes first"
        return self._pair

    def meet(self, group_name: str, rank: int, own_address: str, device: torch.device) -> None:
        """On the thread, with the store set: wait for the other end."""
        assert self.store is not None, "the store comes first"
        group_store = PrefixStore(group_name, self.store)
        self._pair = make_pair(group_store, rank, own_address, device, CONNECT_TIMEOUT_S)

    async def run(self, call: Callable[[], Result]) -> Result:
        """Raises: PeerLost for whatever torch.distributed calls a RuntimeError, and for an address that is none."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, call)
        except (RuntimeError, OSError, ValueError, OverflowError) as error:
            raise PeerLost(f"the torch.distributed pair failed: {error}") from error

    def close(self) -> None:
        """Wake the thread if it waits in the pair, and let both go. One that still waits for its peer to appear ends
        by CONNECT_TIMEOUT_S."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._pair is not None:
            self._pair.abort()
        self._executor.submit(self._let_go)
        self._executor.shutdown(wait=False)

    def _let_go(self) -> None:
        if self._pair is not None:
            self._pair.let_go()
        self._pair = self.store = None
