"""What only links over sockets can get wrong: strangers, several connections, TLS, what outlives a killed process."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import re
import secrets
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.errors import ConfigError, PeerLost, TlsMismatch, TransferAborted, TransferError, WrongSecret
from common.identity import Ticket, new_incarnation, new_transfer_id
from common.pb import kv_transfer_pb2 as pb
from common.rpc import bind_port, new_server
from common.transfer_config import TlsFiles, TransferConfig
from kv_transfer.factory import Surroundings, make_receiver, make_sender, new_way
from kv_transfer.heads import HeadRange
from kv_transfer.link import Endpoint, Way
from kv_transfer.meeting_point import CONTROL, DATA, TOKEN_BYTES
from kv_transfer.receiver import LinkReceiver
from kv_transfer.sender import LinkSender
from kv_transfer.shm import Shm
from kv_transfer.socket_listener import MAX_STRANGERS
from kv_transfer.socket_source import SocketSource
from kv_transfer.tcp import Tcp
from kv_transfer.transport import Destination, KVPiece, Offer
from kv_transfer.wire import MAX_PIECE_BYTES
from tests.kv_transfer import peer
from tests.kv_transfer.certificates import Authority
from tests.kv_transfer.test_death import next_line, peer_process
from tests.kv_transfer.wires import CPU, Landing, new_layout, until

SOURCE = "a-source"
LAYOUT = new_layout()
TIMEOUT_S = 5.0
KINDS = pytest.mark.parametrize("kind", ["tcp", "shm"])

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def receiving(config: TransferConfig) -> AsyncIterator[LinkReceiver]:
    receiver = make_receiver(config, LAYOUT, new_incarnation(), CPU)
    server = new_server()
    receiver.add_to_server(server)
    await receiver.open(bind_port(server, "127.0.0.1", 0))
    await server.start()
    try:
        yield receiver
    finally:
        await receiver.close()
        await server.stop(grace=None)


@asynccontextmanager
async def sending(config: TransferConfig) -> AsyncIterator[LinkSender]:
    sender = make_sender(config, LAYOUT, SOURCE, CPU)
    try:
        yield sender
    finally:
        await sender.close()


def expect(receiver: LinkReceiver, num_tokens: int) -> tuple[Landing, Ticket]:
    landing = Landing(LAYOUT, num_tokens)
    ticket = Ticket(new_transfer_id(), 1, SOURCE, receiver.destination.incarnation, num_tokens)
    landing.reception = receiver.expect(ticket.transfer_id, num_tokens, 0, landing.on_piece)
    return landing, ticket


async def assert_works(sender: LinkSender, receiver: LinkReceiver, num_tokens: int = 200, seed: int = 0) -> None:
    """One piece for every token and layer, shuffled."""
    landing, ticket = expect(receiver, num_tokens)
    shape = (LAYOUT.num_layers, 2, num_tokens, LAYOUT.num_kv_heads, LAYOUT.head_dim)
    data = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    places = [(layer, token) for layer in range(LAYOUT.num_layers) for token in range(num_tokens)]
    random.Random(seed).shuffle(places)
    transfer = await sender.open(receiver.destination, ticket)
    for layer, token in places:
        transfer.send(KVPiece(layer, token, data[layer : layer + 1, :, token : token + 1].contiguous()))
    await transfer.commit(1, TIMEOUT_S)
    assert torch.equal(landing.data, data)
    landing.reception.close()


async def connect(receiver: LinkReceiver) -> Streams:
    offer = receiver.destination.offers[0]
    if offer.transport == "shm":
        return await asyncio.open_unix_connection(f"\0{offer.address}")
    host, _, port = offer.address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def heard(streams: Streams) -> bytes:
    """All that comes until the other end closes."""
    reader, writer = streams
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


def framed(message: pb.LinkRequest) -> bytes:
    serialized = message.SerializeToString()
    return struct.pack("<I", len(serialized)) + serialized


HELLO = pb.LinkRequest(hello=pb.LinkHello(protocol_version=2, nonce=bytes(32)))
PIECE = pb.LinkRequest(piece=pb.Piece(num_bytes=64))


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        CONTROL + b"\xff\xff\xff\x7f",
        CONTROL + struct.pack("<I", 4) + b"\xff\xff\xff\xff",
        CONTROL + framed(PIECE),
        DATA + bytes(TOKEN_BYTES),
    ],
    ids=["another protocol", "a huge message", "no message", "a piece at once", "a data connection of nobody's"],
)
@KINDS
async def test_a_stranger_is_cut_off_and_hears_nothing(kind: str, said: bytes) -> None:
    async with receiving(TransferConfig(transport=kind)) as receiver:
        streams = await connect(receiver)
        streams[1].write(said)
        assert await heard(streams) == b""


def replies_in(heard: bytes) -> list[pb.LinkReply]:
    replies: list[pb.LinkReply] = []
    while heard:
        (num_bytes,) = struct.unpack("<I", heard[:4])
        replies.append(pb.LinkReply.FromString(heard[4 : 4 + num_bytes]))
        heard = heard[4 + num_bytes :]
    return replies


@KINDS
async def test_a_stranger_that_proves_nothing_hears_a_challenge_and_that_it_knows_no_secret(kind: str) -> None:
    async with receiving(TransferConfig(transport=kind, secret=b"the secret of this cluster")) as receiver:
        streams = await connect(receiver)
        streams[1].write(CONTROL + framed(HELLO) + framed(pb.LinkRequest(proof=pb.LinkProof(proof=bytes(32)))))
        answer = await heard(streams)
        challenge, refusal = replies_in(answer)
        assert challenge == pb.LinkReply(challenge=pb.LinkChallenge(nonce=challenge.challenge.nonce))
        assert refusal == pb.LinkReply(refusal=pb.LinkRefusal(error_type="WrongSecret", error=refusal.refusal.error))


@KINDS
async def test_a_source_with_another_secret_is_not_served(kind: str) -> None:
    config = TransferConfig(transport=kind, secret=b"the secret of this cluster")
    async with receiving(config) as receiver, sending(replace(config, secret=b"quite another one")) as sender:
        with pytest.raises(WrongSecret):
            await sender.open(receiver.destination, expect(receiver, 8)[1])


@pytest.mark.parametrize("said", [b"", CONTROL, CONTROL + framed(HELLO)])
@KINDS
async def test_silence_is_cut_off_after_the_handshakes_time(kind: str, said: bytes) -> None:
    config = TransferConfig(transport=kind, connect_timeout_s=0.1, secret=b"the secret of this cluster")
    async with receiving(config) as receiver:
        streams = await connect(receiver)
        streams[1].write(said)
        await heard(streams)


@KINDS
async def test_many_silent_strangers_do_not_keep_a_source_out(kind: str) -> None:
    config = TransferConfig(transport=kind)
    async with receiving(config) as receiver, sending(config) as sender:
        strangers = [await connect(receiver) for _ in range(2 * MAX_STRANGERS)]
        await assert_works(sender, receiver)
        assert await heard(strangers[0]) == b""
        for _, writer in strangers:
            writer.close()
        await assert_works(sender, receiver)


@KINDS
async def test_a_burst_of_strangers_takes_no_more_places_than_there_are(kind: str) -> None:
    async with receiving(TransferConfig(transport=kind)) as receiver:
        strangers = await asyncio.gather(*(connect(receiver) for _ in range(4 * MAX_STRANGERS)))
        for _, writer in strangers:
            writer.write(CONTROL + framed(HELLO))
        await until(lambda: num_served(kind) <= MAX_STRANGERS, "the oldest ones put out")
        for _, writer in strangers:
            writer.close()


@pytest.fixture
def full() -> Iterator[socket.socket]:
    """Listens, and has no place left for anybody."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"\0pdserve-test-{secrets.token_hex(8)}")
        listening.listen(0)
        with socket.socket(socket.AF_UNIX) as waiting:
            waiting.connect(listening.getsockname())  # a queue of none has one place
            yield listening


def name_of(listening: socket.socket) -> str:
    name: bytes = listening.getsockname()
    return name[1:].decode()


async def test_a_source_waits_for_a_place_among_those_that_are_to_be_accepted(full: socket.socket) -> None:
    connecting = asyncio.create_task(Shm().connect(name_of(full)))
    done, _ = await asyncio.wait([connecting], timeout=0.05)
    assert not done
    full.accept()[0].close()
    with await connecting as connected:
        connected.send(b"here")  # fails on a socket that is not connected


async def test_a_source_does_not_wait_for_a_place_for_ever(full: socket.socket) -> None:
    source = SocketSource(Shm(queue_timeout_s=0.02), TIMEOUT_S, name_of(full))
    with pytest.raises(PeerLost, match=r"too many others have waited to be accepted for 0\.02 s"):
        await source.write(HELLO)
    await source.close()


FLOOD = """
import os, socket, sys
os.setuid(65534)
while True:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect("\\0" + sys.argv[1])
"""


@contextmanager
def flooded(address: str) -> Iterator[None]:
    """By another user's processes, which come and go as fast as they can."""
    command = [sys.executable, "-c", FLOOD, address]
    floods = [subprocess.Popen(command) for _ in range(3)]
    try:
        yield
        assert [flood.poll() for flood in floods] == [None] * len(floods)
    finally:
        for flood in floods:
            flood.kill()
            flood.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
async def test_a_flood_of_another_users_connections_keeps_no_source_out() -> None:
    config = TransferConfig(transport="shm")
    async with receiving(config) as receiver:
        with flooded(receiver.destination.offers[0].address):
            for seed in range(5):
                async with sending(config) as sender:
                    await assert_works(sender, receiver, seed=seed)


def num_served(kind: str) -> int:
    return sum(task.get_name() == f"kv-serve-{kind}" for task in asyncio.all_tasks())


async def test_pieces_on_several_connections_arrive_before_their_commit() -> None:
    config = TransferConfig(transport="tcp", tcp_connections=3)
    async with receiving(config) as receiver, sending(config) as sender:
        await asyncio.gather(*(assert_works(sender, receiver, seed=seed) for seed in range(5)))
        assert receiver.stats.pieces_rejected == {}
        assert receiver.stats.stale_pieces == 0


async def test_an_abort_on_several_connections_leaves_room_for_the_next_attempt() -> None:
    config = TransferConfig(transport="tcp", tcp_connections=3)
    async with receiving(config) as receiver, sending(config) as sender:
        landing, ticket = expect(receiver, 8)
        first = await sender.open(receiver.destination, ticket)
        data = torch.ones(LAYOUT.num_layers, 2, 8, LAYOUT.num_kv_heads, LAYOUT.head_dim)
        first.send(KVPiece(0, 0, data[:1].clone()))
        first.abort()
        with pytest.raises(TransferAborted):
            await first.commit(1, TIMEOUT_S)
        second = await sender.open(receiver.destination, replace(ticket, attempt=2))
        second.send(KVPiece(0, 0, data))
        await second.commit(2, TIMEOUT_S)
        assert torch.equal(landing.data, data)


@pytest.mark.parametrize(("kind", "num_connections"), [("tcp", 1), ("tcp", 3), ("shm", 1)])
async def test_one_lost_data_connection_is_the_link_lost(kind: str, num_connections: int) -> None:
    config = TransferConfig(transport=kind, tcp_connections=num_connections)
    channels: list[SocketSource] = []

    def dial(address: str) -> SocketSource:
        channel = new_way(kind, Surroundings(CPU, config)).dial(address)
        assert isinstance(channel, SocketSource)
        channels.append(channel)
        return channel

    sender = LinkSender(Endpoint(LAYOUT, SOURCE, HeadRange(0, LAYOUT.num_kv_heads)), [Way(kind, dial)], config)
    async with receiving(config) as receiver:
        transfer = await sender.open(receiver.destination, expect(receiver, 8)[1])
        channels[0]._senders[-1]._connection.end()
        with pytest.raises(PeerLost):
            await transfer.commit(1, TIMEOUT_S)
        await assert_works(sender, receiver)
        await sender.close()


async def test_a_worker_receives_on_the_port_that_it_is_told_and_names_one_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"transfer\.tcp_port.*127\.0\.0\.1:{port}"):
            async with receiving(TransferConfig(transport="tcp", tcp_port=port)):
                pass
    async with receiving(TransferConfig(transport="tcp", tcp_port=port)) as receiver:
        assert receiver.destination.offers == (Offer("tcp", f"127.0.0.1:{port}"),)


async def test_auto_takes_the_first_way_that_works() -> None:
    config = TransferConfig()
    async with receiving(config) as receiver:
        offers = receiver.destination.offers
        assert [offer.transport for offer in offers] == ["shm", "tcp", "grpc"]
        unreachable = [replace(offer, address="127.0.0.1:1") for offer in offers]
        for index, transport in enumerate(["shm", "tcp", "grpc/inline"]):
            async with sending(config) as sender:
                ways = (*unreachable[:index], *offers[index:])
                destination = replace(receiver.destination, offers=ways)
                await sender.open(destination, expect(receiver, 8)[1])
                assert [link.transport for link in sender.links()] == [transport]


async def test_a_peer_of_version_1_is_told_of_a_way_that_it_knows() -> None:
    async with receiving(TransferConfig()) as receiver:
        message = receiver.destination.to_pb()
        assert message.transport == "grpc"
        assert message.address == receiver.destination.offers[-1].address
        assert Destination.from_pb(message) == receiver.destination


@KINDS
async def test_a_killed_process_leaves_no_name_and_no_file_behind(kind: str) -> None:
    before = shared_memory_files()
    async with peer_process("receive", kind) as process:
        address = await next_line(process)
        async with sending(TransferConfig(transport=kind)) as sender:
            destination = Destination(peer.DESTINATION, (Offer(kind, address),), 2)
            await sender.open(destination, peer.ticket(SOURCE, peer.DESTINATION))
            process.kill()
            await process.wait()
    assert shared_memory_files() <= before
    assert address not in unix_sockets()


async def test_a_destination_that_takes_nothing_is_lost_after_a_while() -> None:
    near, far = socket.socketpair()

    class FullPipe(Tcp):
        async def connect(self, address: str) -> socket.socket:
            near.setblocking(False)
            return near

    source = SocketSource(FullPipe(), 0.1, "nobody:1")
    await source.attach(pb.LinkWelcome(num_connections=1, data_token=bytes(TOKEN_BYTES)))
    piece, payload = pb.LinkRequest(piece=pb.Piece()), torch.zeros(MAX_PIECE_BYTES, dtype=torch.uint8)
    await source.write(piece, payload)
    with pytest.raises(PeerLost, match="taken no KV"):
        await source.write(piece, payload)
    await source.close()
    far.close()


def shared_memory_files() -> set[Path]:
    return set(Path("/dev/shm").iterdir())


def unix_sockets() -> str:
    return Path("/proc/net/unix").read_text(encoding="ascii")


def tls(files: TlsFiles | None) -> TransferConfig:
    return TransferConfig(transport="tcp", tls=files, tcp_connections=2, connect_timeout_s=2.0)


async def test_with_tls_pieces_arrive(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    async with (
        receiving(tls(authority.certify("decode"))) as receiver,
        sending(tls(authority.certify("prefill"))) as sender,
    ):
        await assert_works(sender, receiver)


@pytest.mark.parametrize("end", ["source", "destination"])
async def test_who_is_not_certified_by_the_authority_gets_no_link(tmp_path: Path, end: str) -> None:
    certified = tls(Authority(tmp_path, "authority").certify("certified"))
    other = tls(Authority(tmp_path, "another").certify("other"))
    source, destination = (other, certified) if end == "source" else (certified, other)
    async with receiving(destination) as receiver, sending(source) as sender:
        with pytest.raises(TransferError):
            await sender.open(receiver.destination, expect(receiver, 8)[1])


@pytest.mark.parametrize(("end", "other"), [("source", "destination"), ("destination", "source")])
async def test_tls_at_one_end_alone_is_an_incompatibility_that_both_name(
    tmp_path: Path, end: str, other: str, caplog: pytest.LogCaptureFixture
) -> None:
    certified, clear = tls(Authority(tmp_path, "authority").certify("certified")), tls(None)
    source, destination = (certified, clear) if end == "source" else (clear, certified)
    named = rf"transfer\.tls.* is configured at the {end} and not at the {other}"
    async with receiving(destination) as receiver, sending(source) as sender:
        with caplog.at_level(logging.WARNING), pytest.raises(TlsMismatch, match=named):
            await sender.open(receiver.destination, expect(receiver, 8)[1])
        assert sender.links() == receiver.links() == []
    for side in ("sender", "receiver" if end == "source" else "socket_listener"):
        assert [re.search(named, said) for name, said in messages(caplog) if name == f"kv_transfer.{side}"]


def messages(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.name, record.getMessage()) for record in caplog.records]


@pytest.mark.parametrize("said", [b"", b"pd", CONTROL + b"GET / HTTP/1.1\r\n\r\n", CONTROL + framed(PIECE)])
async def test_a_stranger_hears_nothing_from_a_destination_with_tls(tmp_path: Path, said: bytes) -> None:
    config = replace(tls(Authority(tmp_path, "authority").certify("decode")), connect_timeout_s=0.5)
    async with receiving(config) as receiver:
        streams = await connect(receiver)
        streams[1].write(said)
        assert await heard(streams) == b""


async def test_with_tls_nothing_crosses_a_network_in_the_clear(tmp_path: Path) -> None:
    files = Authority(tmp_path, "authority").certify("decode")
    async with receiving(TransferConfig(tls=files)) as receiver:
        assert [offer.transport for offer in receiver.destination.offers] == ["shm", "tcp"]
    with pytest.raises(ConfigError, match=r"transfer\.tls does not cover grpc"):
        make_receiver(TransferConfig(transport="grpc", tls=files), LAYOUT, new_incarnation(), CPU)
    missing = replace(files, key=tmp_path / "missing.key")
    with pytest.raises(ConfigError, match=r"transfer\.tls: cannot use .*missing\.key"):
        make_receiver(TransferConfig(transport="tcp", tls=missing), LAYOUT, new_incarnation(), CPU)
