"""What only a payload channel beside the control stream can get wrong."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from contextlib import suppress
from functools import partial

import pytest
import torch
from torch import Tensor

from common.errors import PeerLost, TransferAborted
from common.pb import kv_transfer_pb2 as pb
from kv_transfer.grpc_stream import GrpcLinkStream
from kv_transfer.heads import HeadRange
from kv_transfer.link import Endpoint, PackedPayload, Way
from kv_transfer.pair_meeting import PairMeeting
from kv_transfer.pair_store import PairStore
from kv_transfer.pair_threads import PairThreads
from kv_transfer.sender import LinkSender
from kv_transfer.stream_channel import StreamSource, WriteRequest
from kv_transfer.torch_dist import TorchDistSource
from kv_transfer.torch_pair import DESTINATION, SOURCE, Pair, Tokens, make_pair
from kv_transfer.transport import KVPiece, TransferStats
from tests.kv_transfer.wires import CPU, NewWire, Wire, until


class SilentSource:
    """Announces payloads and, once told to be silent, keeps them."""

    def __init__(self) -> None:
        self._inner = TorchDistSource(CPU, "127.0.0.1")
        self.name = self._inner.name
        self.is_silent = False

    async def attach(self, welcome: pb.LinkWelcome, write: WriteRequest) -> None:
        await self._inner.attach(welcome, write)

    async def put(self, piece: pb.Piece, flat: Tensor) -> None:
        pass

    async def pack(self, flat: Tensor) -> PackedPayload:
        return await self._inner.pack(flat)

    async def push(self, flat: Tensor) -> None:
        if not self.is_silent:
            await self._inner.push(flat)

    def on_credit(self, num_bytes: int) -> None:
        pass

    async def close(self) -> None:
        await self._inner.close()


def sender_over(payloads: SilentSource, wire: Wire) -> LinkSender:
    endpoint = Endpoint(wire.layout, wire.source_incarnation, HeadRange(0, wire.layout.num_kv_heads))

    def dial(address: str) -> StreamSource:
        return StreamSource("torch_dist", GrpcLinkStream("torch_dist", address), payloads)

    return LinkSender(endpoint, [Way("torch_dist", dial)], wire.config, TransferStats())


def pair_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("kv-pair")}


@pytest.mark.parametrize("closing_end", ["source", "destination"])
async def test_a_receive_that_waits_for_a_payload_is_woken_by_closing(closing_end: str, new_wire: NewWire) -> None:
    wire = await new_wire("torch_dist")
    before = pair_threads()
    silent = SilentSource()
    sender = sender_over(silent, wire)
    _, ticket = wire.expect(num_tokens=8)
    transfer = await sender.open(wire.receiver.destination, ticket)
    assert len(pair_threads() - before) == 4  # at either end one posts, one waits
    silent.is_silent = True
    num_probed = sender.stats.pieces
    transfer.send(KVPiece(0, 0, wire.new_data(8)))
    committing = asyncio.create_task(transfer.commit(1, timeout_s=20))
    await until(lambda: sender.stats.pieces == num_probed + 1, "the header written")
    await (sender.close() if closing_end == "source" else wire.receiver.close())
    with pytest.raises((PeerLost, TransferAborted)):
        await committing
    await until(lambda: not pair_threads() - before, "all threads gone", timeout_s=3.0)
    await sender.close()


async def test_a_source_that_never_meets_its_pair_does_not_hold_the_destination(new_wire: NewWire) -> None:
    wire = await new_wire("torch_dist")

    class Absent(SilentSource):
        async def attach(self, welcome: pb.LinkWelcome, write: WriteRequest) -> None:
            raise PeerLost("cannot reach the pair")

    sender = sender_over(Absent(), wire)
    _, ticket = wire.expect(num_tokens=8)
    with pytest.raises(PeerLost, match="cannot reach the pair"):
        await sender.open(wire.receiver.destination, ticket)
    await wire.receiver.close()
    await sender.close()


@pytest.mark.parametrize("value", [b"x", bytes(7), b"y" * 170, bytes(171)])
async def test_a_welcome_that_says_nonsense_of_the_pair_is_a_lost_peer(value: bytes) -> None:
    source = TorchDistSource(CPU, "127.0.0.1")
    welcome = pb.LinkWelcome(pair=pb.PairEntry(key="0/0", value=value))
    with pytest.raises(PeerLost):
        await source.attach(welcome, into_the_void)
    await source.close()


@pytest.mark.parametrize("host", ["", "1r7.0.0.1", "[::1"])
async def test_a_host_that_is_none_is_a_lost_peer(host: str) -> None:
    source = TorchDistSource(CPU, host)
    with pytest.raises(PeerLost):
        await source.attach(pb.LinkWelcome(), into_the_void)
    await source.close()


def test_a_pair_moves_several_payloads_at_once_and_a_timeout_kills_it_on_both_sides() -> None:
    pairs = make_pairs()
    sent = [torch.full((256,), number, dtype=torch.uint8) for number in range(8)]
    received = [torch.zeros(256, dtype=torch.uint8) for _ in sent]
    receiving = [pairs[DESTINATION].receive(flat) for flat in received]
    sending = [pairs[SOURCE].send(flat) for flat in sent]
    for moving in [*receiving, *sending]:
        moving.finish(5.0)
    assert all(torch.equal(one, other) for one, other in zip(sent, received, strict=True))
    with pytest.raises(RuntimeError):
        pairs[DESTINATION].receive(received[0]).finish(0.01)
    with pytest.raises(RuntimeError):
        pairs[SOURCE].receive(received[0]).finish(5.0)
    for pair in pairs.values():
        pair.let_go()


async def test_a_wrong_size_in_the_middle_loses_the_link_after_what_came_before_it(new_wire: NewWire) -> None:
    wire = await new_wire("torch_dist")
    landing, ticket = wire.expect(num_tokens=8)
    num_pieces = 0

    def enlarge_the_third(request: pb.LinkRequest) -> list[pb.LinkRequest]:
        nonlocal num_pieces
        if request.HasField("piece") and request.piece.ticket.transfer_id == ticket.transfer_id:
            num_pieces += 1
            request.piece.num_bytes += num_pieces == 3
        return [request]

    sender = wire.new_sender(fault=enlarge_the_third)
    transfer = await sender.open(wire.receiver.destination, ticket)
    data = wire.new_data(8)
    for layer in range(4):
        transfer.send(KVPiece(layer, 0, data[layer : layer + 1]))
    with pytest.raises(PeerLost):
        await transfer.commit(1, timeout_s=20)
    assert [piece.layer_start for piece in landing.pieces] == [0, 1]
    assert all(torch.equal(piece.data, data[piece.layer_start :][:1]) for piece in landing.pieces)


@pytest.mark.parametrize("closing_end", ["source", "destination"])
async def test_closing_ends_every_receive_that_is_posted(closing_end: str, new_wire: NewWire) -> None:
    wire = await new_wire("torch_dist")
    before = pair_threads()
    silent = SilentSource()
    sender = sender_over(silent, wire)
    landing, ticket = wire.expect(num_tokens=8)
    transfer = await sender.open(wire.receiver.destination, ticket)
    silent.is_silent = True
    num_probed = sender.stats.pieces
    for layer in range(4):
        transfer.send(KVPiece(layer, 0, wire.new_data(8)[layer : layer + 1]))
    committing = asyncio.create_task(transfer.commit(1, timeout_s=20))
    await until(lambda: sender.stats.pieces == num_probed + 4, "all headers written")
    await (sender.close() if closing_end == "source" else wire.receiver.close())
    with pytest.raises((PeerLost, TransferAborted)):
        await committing
    await until(lambda: not pair_threads() - before, "all threads gone", timeout_s=3.0)
    assert landing.pieces == []
    await sender.close()


async def test_a_stranger_that_takes_the_place_of_the_source_on_the_pair_is_found_out() -> None:
    """It has guessed what gloo asks for, and listened to where the destination is; it does not know the token."""
    destination, stranger = PairThreads(5.0), PairThreads(5.0)
    expecting = PairMeeting(destination, DESTINATION, CPU, lambda: "127.0.0.1")
    guessing = PairMeeting(stranger, SOURCE, CPU, lambda: "127.0.0.1")
    guessing.hear(await expecting.begin(Tokens(b"right", b"never shown")))
    expecting.hear(await guessing.begin(Tokens(b"wrong", b"never shown")))
    with pytest.raises(PeerLost, match="stranger"):
        await expecting.complete()
    expecting.close()
    destination.close()
    with pytest.raises(PeerLost):
        await guessing.complete()
    guessing.close()
    stranger.close()


async def test_a_stranger_that_takes_the_place_of_the_destination_gets_no_payload() -> None:
    source, stranger = PairThreads(5.0), PairThreads(5.0)
    joining = PairMeeting(source, SOURCE, CPU, lambda: "127.0.0.1")
    guessing = PairMeeting(stranger, DESTINATION, CPU, lambda: "127.0.0.1")
    joining.hear(await guessing.begin(Tokens(b"shown", b"wrong")))
    guessing.hear(await joining.begin(Tokens(b"shown", b"right")))
    with pytest.raises(PeerLost, match="stranger"):
        await joining.complete()
    for meeting, threads in ((joining, source), (guessing, stranger)):
        meeting.close()
        threads.close()


async def test_strangers_at_the_port_of_gloo_neither_break_a_link_nor_hear_anything(new_wire: NewWire) -> None:
    ports_before = listening_ports()
    wire = await new_wire("torch_dist")
    _, ticket = wire.expect(num_tokens=8)
    transfer = await wire.sender.open(wire.receiver.destination, ticket)
    strangers = []
    for port in listening_ports() - ports_before:
        for says in (b"", b"x", bytes(8), b"y" * 4096):
            stranger = socket.create_connection(("127.0.0.1", port))
            stranger.sendall(says)
            stranger.setblocking(False)
            strangers.append(stranger)
    data = wire.new_data(8)
    transfer.send(KVPiece(0, 0, data))
    await transfer.commit(1, timeout_s=20)
    for stranger in strangers:
        if stranger.getpeername()[1] != wire_port(wire):
            with pytest.raises(BlockingIOError):
                stranger.recv(1)
        stranger.close()


def test_a_store_that_is_closed_ends_whoever_waits_in_it() -> None:
    store = PairStore(lambda key, value: None, timeout_s=60.0)
    errors: list[Exception] = []

    def wait() -> None:
        try:
            store.get("never said")
        except RuntimeError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    store.close()
    waiting.join(5.0)
    assert len(errors) == 1


async def into_the_void(request: pb.LinkRequest) -> None:
    pass


def listening_ports() -> set[int]:
    """Of this process, for IPv4."""
    inodes = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            inodes.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    with open("/proc/net/tcp", encoding="ascii") as sockets:
        listening = [line.split() for line in sockets if line.split()[3] == "0A"]
    return {int(line[1].rpartition(":")[2], 16) for line in listening if f"socket:[{line[9]}]" in inodes}


def wire_port(wire: Wire) -> int:
    return int(wire.receiver.destination.offers[0].address.rpartition(":")[2])


def make_pairs() -> dict[int, Pair]:
    stores: dict[int, PairStore] = {}
    pairs: dict[int, Pair] = {}

    def store_of(rank: int) -> PairStore:
        return PairStore(lambda key, value: stores[1 - rank].hear(key, value), 5.0)

    def meet(rank: int) -> None:
        pairs[rank] = make_pair(stores[rank], rank, "127.0.0.1", CPU, 5.0)

    stores = {rank: store_of(rank) for rank in (DESTINATION, SOURCE)}
    threads = [threading.Thread(target=partial(meet, rank)) for rank in (DESTINATION, SOURCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return pairs
