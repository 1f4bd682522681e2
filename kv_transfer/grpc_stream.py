"""The message stream over gRPC: the source's dial, and the service that the decode worker's own server offers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, cast

import grpc

from common.cluster_access import NO_SECRET, ClusterAccess, connect
from common.errors import IncompatiblePeer, PeerLost, TransferError
from common.pb import kv_transfer_pb2 as pb
from common.pb.kv_transfer_pb2_grpc import KVTransferServicer, KVTransferStub, add_KVTransferServicer_to_server
from common.rpc import answering, to_serving_error
from kv_transfer.link import Serve
from kv_transfer.stream_channel import PayloadDestination, StreamDestination

END_S = 1.0
TRANSPORT_KEY = "pdserve-kv-transport"  # metadata of a Link call and of its acceptance; absent from older peers


class GrpcLinkStream:
    """One channel with one Link call; both end together. Let go of at close: a closed channel that is still referred
    to keeps its sockets, and finished tasks keep references until the garbage collector comes by."""

    def __init__(self, transport: str, address: str, access: ClusterAccess = NO_SECRET) -> None:
        """access: the link's own handshake proves more than the call does, but only once a hello has been received, and
        gRPC's limit is one for all methods of a server: far more than a stranger should be able to make it hold."""
        self._address = address
        self._is_begun = self._is_closed = False
        self._channel = connect(address, access)
        self._call = KVTransferStub(self._channel).Link(metadata=((TRANSPORT_KEY, transport),))

    async def write(self, request: pb.LinkRequest) -> None:
        if not self._is_begun:
            self._is_begun = True
            await self._accepted_or_ended()
        try:
            with _stream_errors(self._address):
                await self._call.write(request)
        except PeerLost:
            await self._raise_end()  # a write that meets the end of the call does not say how it ended
            raise

    async def read(self) -> pb.LinkReply:
        with _stream_errors(self._address):
            reply = await self._call.read()
        if not isinstance(reply, pb.LinkReply):  # grpc.aio.EOF
            raise PeerLost(f"{self._address} ended the KV link")
        return reply

    async def _accepted_or_ended(self) -> None:
        """A first write that met a refusal under way would lose its reason: grpc.aio then only knows an internal error.
        Older peers do not say that they accept a call; they get END_S to refuse it."""
        with suppress(TimeoutError, grpc.aio.AioRpcError):
            async with asyncio.timeout(END_S):
                if TRANSPORT_KEY not in await self._call.initial_metadata():
                    await self._call.code()

    async def _raise_end(self) -> None:
        """Raise what the other end ended the call with, if it is known within END_S."""
        call = self._call
        with suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                code, details, trailing = await call.code(), await call.details(), await call.trailing_metadata()
            if code is not grpc.StatusCode.OK:
                with _stream_errors(self._address):
                    raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details, "")

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            call, channel = self._call, self._channel
            del self._call, self._channel
            call.cancel()
            # After a write that failed grpc.aio takes the call for done, and its cancel does nothing; but while replies
            # wait that nobody reads, the core's call goes on, and with it a task and the connection.
            call._cython_call.cancel("the link is closed")
            await channel.close(grace=None)


class GrpcListener:
    """A Listener at the worker's own gRPC server; `add_link_service` puts it there."""

    def __init__(self, transport: str, new_payloads: Callable[[str], PayloadDestination]) -> None:
        """new_payloads: for one link, given this worker's own host."""
        self.transport = transport
        self._new_payloads = new_payloads
        self._serve: Serve | None = None
        self._host = ""

    async def open(self, worker_address: str, serve: Serve) -> str:
        self._serve = serve
        self._host = worker_address.rpartition(":")[0]
        return worker_address

    async def close(self) -> None:
        """Its links end with the receiver's, its port with the server."""

    async def serve(
        self, requests: AsyncIterable[pb.LinkRequest], write: Callable[[pb.LinkReply], Awaitable[None]]
    ) -> None:
        if self._serve is None:
            raise PeerLost("this worker is still starting")
        await self._serve(StreamDestination(self.transport, requests, write, self._new_payloads(self._host)))


def add_link_service(listeners: Sequence[GrpcListener], server: grpc.aio.Server) -> None:
    add_KVTransferServicer_to_server(_LinkService(listeners), server)


class _LinkService(KVTransferServicer):
    def __init__(self, listeners: Sequence[GrpcListener]) -> None:
        self._listeners = {listener.transport: listener for listener in listeners}

    async def Link(
        self, request_iterator: AsyncIterator[pb.LinkRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        async with answering(context):
            metadata = dict(cast("Sequence[tuple[str, str]]", context.invocation_metadata() or ()))
            transport = metadata.get(TRANSPORT_KEY, next(iter(self._listeners), ""))
            if transport not in self._listeners:
                raise IncompatiblePeer(f"transports differ: this side does not receive over the source's {transport!r}")

            async def accepted() -> AsyncIterator[pb.LinkRequest]:
                """From the first read on: until then the call may still be refused."""
                await context.send_initial_metadata(((TRANSPORT_KEY, transport),))
                async for request in request_iterator:
                    yield request

            await self._listeners[transport].serve(accepted(), context.write)


@contextmanager
def _stream_errors(address: str) -> Iterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        found = to_serving_error(error, address)
        if isinstance(found, TransferError | IncompatiblePeer):
            raise found from error
        raise PeerLost(f"{address}: {found.message}") from error
    except asyncio.InvalidStateError as error:  # grpc.aio's word for writing to a call that has ended
        raise PeerLost(f"{address} ended the KV link") from error
