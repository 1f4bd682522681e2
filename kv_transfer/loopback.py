"""Source and destination in one process, without a network: the same links and checks over in-memory streams."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator

from common.errors import PeerLost, ServingError
from common.pb import kv_transfer_pb2 as pb
from kv_transfer.inline import InlineDestination
from kv_transfer.link import Serve
from kv_transfer.stream_channel import StreamDestination

_MAX_FRAMES_IN_FLIGHT = 8  # backpressure, as a socket's buffer gives it


class LoopbackNetwork:
    """Who listens at which address; the senders and receivers that are to meet share one."""

    def __init__(self) -> None:
        self._listeners: dict[str, Serve] = {}
        self._numbers = itertools.count(1)

    def listen(self, serve: Serve, address: str | None) -> str:
        """Take an address, as a restarted process takes its predecessor's port, or a fresh one."""
        address = address or f"loopback:{next(self._numbers)}"
        self._listeners[address] = serve
        return address

    def dial(self, address: str) -> LoopbackStream:
        return LoopbackStream(self._listeners.get(address), address)


class LoopbackListener:
    transport = "loopback"

    def __init__(self, network: LoopbackNetwork) -> None:
        self._network = network

    async def open(self, worker_address: str, serve: Serve) -> str:
        is_taken_over = worker_address.startswith("loopback:")
        return self._network.listen(serve, worker_address if is_taken_over else None)

    async def close(self) -> None:
        pass


class LoopbackStream:
    """A LinkStream whose other end is a task of this event loop."""

    def __init__(self, serve: Serve | None, address: str) -> None:
        self._address = address
        self._requests: asyncio.Queue[pb.LinkRequest] = asyncio.Queue(_MAX_FRAMES_IN_FLIGHT)
        self._replies: asyncio.Queue[pb.LinkReply | ServingError] = asyncio.Queue()
        self._task = asyncio.create_task(self._run(serve), name=f"kv-loopback-{address}")

    async def write(self, request: pb.LinkRequest) -> None:
        """A peer that is lost meanwhile shows in `read`."""
        await self._requests.put(request)

    async def read(self) -> pb.LinkReply:
        reply = await self._replies.get()
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self, serve: Serve | None) -> None:
        loss: ServingError = PeerLost(f"{self._address} ended the KV link")
        try:
            if serve is not None:
                await serve(StreamDestination("loopback", self._incoming(), self._replies.put, InlineDestination()))
        except ServingError as refused:
            loss = refused
        finally:
            self._replies.put_nowait(loss)

    async def _incoming(self) -> AsyncIterator[pb.LinkRequest]:
        while True:
            yield await self._requests.get()
