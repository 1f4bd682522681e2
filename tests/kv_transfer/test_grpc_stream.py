"""The message stream over gRPC, where its two ends do not part in order."""

from __future__ import annotations

import asyncio
import gc

import grpc
import pytest

from common.cluster_access import ClusterAccess, new_cluster_server
from common.errors import PeerLost, UnprovenCaller
from common.pb import kv_transfer_pb2 as pb
from common.rpc import bind_port, new_server
from kv_transfer.grpc_stream import GrpcLinkStream, GrpcListener, add_link_service
from kv_transfer.inline import InlineDestination
from kv_transfer.stream_channel import StreamDestination

NUM_LINKS = 3
PIECE = pb.LinkRequest(piece=pb.Piece(payload=bytes(100_000)))


async def serving(serve: object, server: grpc.aio.Server) -> tuple[grpc.aio.Server, str]:
    listener = GrpcListener("grpc", lambda _: InlineDestination())
    add_link_service([listener], server)
    address = bind_port(server, "127.0.0.1", 0)
    await listener.open(address, serve)
    await server.start()
    return server, address


async def answer_to(hello: pb.LinkHello, stream: GrpcLinkStream) -> pb.LinkReply:
    await stream.write(pb.LinkRequest(hello=hello))
    return await stream.read()


async def write_for_ever(stream: GrpcLinkStream) -> None:
    while True:
        await stream.write(PIECE)
        await asyncio.sleep(0.005)


async def test_a_link_that_ends_with_replies_unread_leaves_nothing_behind() -> None:
    async def end_with_credits(channel: StreamDestination) -> None:
        await channel.read()
        for _ in range(3):
            await channel.write(pb.LinkReply(credit=pb.LinkCredit(num_bytes=1)))
        raise PeerLost("the destination ends the link")

    server, address = await serving(end_with_credits, new_server())
    before = asyncio.all_tasks()
    for _ in range(NUM_LINKS):
        stream = GrpcLinkStream("grpc", address)
        await stream.write(pb.LinkRequest(hello=pb.LinkHello()))
        with pytest.raises(PeerLost):
            await write_for_ever(stream)
        await stream.close()
    del stream
    for _ in range(100):
        gc.collect()
        if len(asyncio.all_tasks() - before) <= 1:  # the server has one of its own since its first call
            break
        await asyncio.sleep(0.05)
    assert len(asyncio.all_tasks() - before) <= 1
    await server.stop(None)


async def test_a_hello_of_30_mb_that_nobody_proved_is_refused_before_it_is_received() -> None:
    """A server's limit must fit the largest message of any method, and that of every caller at once."""
    served: list[StreamDestination] = []

    async def note(channel: StreamDestination) -> None:
        served.append(channel)
        await channel.read()

    access = ClusterAccess(b"the secret of this cluster")
    server, address = await serving(note, new_cluster_server(access))
    for stranger in (ClusterAccess(), ClusterAccess(b"the secret of another one")):
        stream = GrpcLinkStream("grpc", address, stranger)
        with pytest.raises(UnprovenCaller, match=r"security\.secret_file"):
            await answer_to(pb.LinkHello(nonce=bytes(30_000_000)), stream)
        await stream.close()
    assert served == []
    stream = GrpcLinkStream("grpc", address, access)
    with pytest.raises(PeerLost):
        await answer_to(pb.LinkHello(), stream)
    assert len(served) == 1
    await stream.close()
    await server.stop(None)


async def test_a_piece_before_the_handshake_is_told_what_a_link_begins_with() -> None:
    async def read_one(channel: StreamDestination) -> None:
        await channel.read()

    server, address = await serving(read_one, new_server())
    stream = GrpcLinkStream("grpc", address)
    await stream.write(PIECE)
    with pytest.raises(PeerLost, match="a link begins with hello"):
        await stream.read()
    await stream.close()
    await server.stop(None)
