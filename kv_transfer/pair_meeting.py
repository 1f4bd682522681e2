"""How the two ends of a link's pair meet: each says where it is over the link's stream, then shows its token there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import torch

from common.errors import PeerLost
from common.pb import kv_transfer_pb2 as pb
from kv_transfer.pair_store import PairStore
from kv_transfer.pair_threads import PairThreads, retrieve
from kv_transfer.torch_pair import SOURCE, Pair, Tokens, make_pair, prove

CONNECT_TIMEOUT_S = 10.0
_MIN_ENTRY_BYTES = 8  # gloo reads as many without a look at the length


class PairMeeting:
    """Of one link; made and used on one event loop."""

    def __init__(self, threads: PairThreads, rank: int, device: torch.device, own_address: Callable[[], str]) -> None:
        """own_address: where this end can be reached; may take its time."""
        self._threads = threads
        self._rank = rank
        self._device = device
        self._own_address = own_address
        self._loop = asyncio.get_running_loop()
        self._said: asyncio.Future[pb.PairEntry] = self._loop.create_future()
        self._making: asyncio.Task[None] | None = None
        self._store = PairStore(self._on_said, CONNECT_TIMEOUT_S)
        if rank == SOURCE and device.type == "cuda":  # NCCL's id is the destination's to make
            self._said.set_result(pb.PairEntry())

    def hear(self, entry: pb.PairEntry) -> None:
        """What the other end said, if it has anything to say. Raises: PeerLost."""
        if not entry.key:
            return
        if len(entry.value) < _MIN_ENTRY_BYTES:
            raise PeerLost(f"the other end of the pair says where it is in {len(entry.value)} bytes")
        self._store.hear(entry.key, entry.value)

    async def begin(self, tokens: Tokens) -> pb.PairEntry:
        """What the other end must hear. Raises: PeerLost."""
        making = self._threads.make(self._new_pair, lambda pair: self._prove(pair, tokens))
        self._making = asyncio.create_task(making, name="kv-pair-meeting")
        self._making.add_done_callback(self._on_made)
        return await self._said

    async def complete(self) -> None:
        """Both have said it: wait for the pair. Raises: PeerLost."""
        assert self._making is not None, "begin comes first"
        await self._making

    def close(self) -> None:
        """Safe to call twice. One that waits in gloo or NCCL for its peer ends by CONNECT_TIMEOUT_S."""
        self._store.close()
        if self._making is not None:
            self._making.cancel()

    def _new_pair(self) -> Pair:
        """On the thread, like the next."""
        return make_pair(self._store, self._rank, self._own_address(), self._device, CONNECT_TIMEOUT_S)

    def _prove(self, pair: Pair, tokens: Tokens) -> None:
        prove(pair, self._rank, tokens, self._device, CONNECT_TIMEOUT_S)

    def _on_made(self, making: asyncio.Task[None]) -> None:
        retrieve(making)
        if not self._said.done():
            error = None if making.cancelled() else making.exception()
            self._said.set_exception(error or PeerLost("the pair was given up"))
            retrieve(self._said)

    def _on_said(self, key: str, value: bytes) -> None:
        with suppress(RuntimeError):  # the loop is gone, and with it whoever would have told the other end
            self._loop.call_soon_threadsafe(self._say, pb.PairEntry(key=key, value=value))

    def _say(self, entry: pb.PairEntry) -> None:
        if not self._said.done():
            self._said.set_result(entry)
