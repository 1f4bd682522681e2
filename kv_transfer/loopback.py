"""Source and destination in one process, without a network: the same links and checks over in-memory streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from common.errors import IncompatiblePeer, PeerLost, TransferError
from common.pb import kv_transfer_pb2 as pb
from kv_transfer.receiver import LinkReceiver
from kv_transfer.transport import Destination

_MAX_FRAMES_IN_FLIGHT = 8  # backpressure, as a socket's buffer gives it


class LoopbackNetwork:
    """Who listens at which address; the senders and receivers that are to meet share one."""

    def __init__(self) -> None:
        self._receivers: dict[str, LinkReceiver] = {}

    def listen(self, receiver: LinkReceiver) -> None:
        """Take the receiver's address, as a restarted process takes its predecessor's port."""
        self._receivers[receiver.destination.address] = receiver

    def dial(self, destination: Destination) -> LoopbackStream:
        return LoopbackStream(self._receivers.get(destination.address), destination.address)


class LoopbackStream:
    """A LinkStream whose other end is a task of this event loop."""

    def __init__(self, receiver: LinkReceiver | None, address: str) -> None:
        self._address = address
        self._requests: asyncio.Queue[pb.LinkRequest] = asyncio.Queue(_MAX_FRAMES_IN_FLIGHT)
        self._replies: asyncio.Queue[pb.LinkReply | TransferError | IncompatiblePeer] = asyncio.Queue()
        self._task = asyncio.create_task(self._serve(receiver), name=f"kv-loopback-{address}")

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

    async def _serve(self, receiver: LinkReceiver | None) -> None:
        loss: TransferError | IncompatiblePeer = PeerLost(f"{self._address} ended the KV link")
        try:
            if receiver is not None:
                await receiver.serve(self._incoming(), self._replies.put)
        except (TransferError, IncompatiblePeer) as refused:
            loss = refused
        finally:
            self._replies.put_nowait(loss)

    async def _incoming(self) -> AsyncIterator[pb.LinkRequest]:
        while True:
            yield await self._requests.get()
