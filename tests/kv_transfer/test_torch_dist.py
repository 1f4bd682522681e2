"""What only a payload channel beside the control stream can get wrong."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest
import torch
from torch import Tensor

from common.errors import PeerLost, TransferAborted
from common.pb import kv_transfer_pb2 as pb
from kv_transfer.grpc_stream import GrpcLinkStream
from kv_transfer.heads import HeadRange
from kv_transfer.link import Endpoint, PackedPayload, Way
from kv_transfer.sender import LinkSender
from kv_transfer.stream_channel import StreamSource
from kv_transfer.torch_dist import TorchDistSource
from kv_transfer.torch_pair import DESTINATION, SOURCE, Pair, host_store, join_store, make_pair
from kv_transfer.transport import KVPiece, TransferStats
from tests.kv_transfer.wires import CPU, NewWire, Wire, until


class SilentSource:
    """Announces payloads and, once told to be silent, keeps them."""

    def __init__(self) -> None:
        self._inner = TorchDistSource(CPU)
        self.name = self._inner.name
        self.is_silent = False

    async def attach(self, welcome: pb.LinkWelcome) -> None:
        await self._inner.attach(welcome)

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
    assert len(pair_threads() - before) == 2
    silent.is_silent = True
    num_probed = sender.stats.pieces
    transfer.send(KVPiece(0, 0, wire.new_data(8)))
    committing = asyncio.create_task(transfer.commit(1, timeout_s=20))
    await until(lambda: sender.stats.pieces == num_probed + 1, "the header written")
    await (sender.close() if closing_end == "source" else wire.receiver.close())
    with pytest.raises((PeerLost, TransferAborted)):
        await committing
    await until(lambda: not pair_threads() - before, "both threads gone", timeout_s=3.0)
    await sender.close()


async def test_a_source_that_never_meets_its_pair_does_not_hold_the_destination(new_wire: NewWire) -> None:
    wire = await new_wire("torch_dist")

    class Absent(SilentSource):
        async def attach(self, welcome: pb.LinkWelcome) -> None:
            raise PeerLost("cannot reach the store")

    sender = sender_over(Absent(), wire)
    _, ticket = wire.expect(num_tokens=8)
    with pytest.raises(PeerLost, match="cannot reach the store"):
        await sender.open(wire.receiver.destination, ticket)
    await wire.receiver.close()
    await sender.close()


@pytest.mark.parametrize("address", ["", "127.0.0.1", "1r7.0.0.1:80", "127.0.0.1:port", "127.0.0.1:70000"])
async def test_a_welcome_with_an_address_that_is_none_is_a_lost_peer(address: str) -> None:
    source = TorchDistSource(CPU)
    with pytest.raises(PeerLost):
        await source.attach(pb.LinkWelcome(store_address=address, group_name="group"))
    await source.close()


def test_a_pair_moves_bytes_and_a_timeout_kills_it_on_both_sides() -> None:
    pairs = make_pairs()
    sent = torch.arange(256, dtype=torch.uint8)
    received = torch.zeros(256, dtype=torch.uint8)
    sending = threading.Thread(target=pairs[SOURCE].send, args=(sent, 5.0))
    sending.start()
    pairs[DESTINATION].receive(received, 5.0)
    sending.join()
    assert torch.equal(sent, received)
    with pytest.raises(RuntimeError):
        pairs[DESTINATION].receive(received, 0.01)
    with pytest.raises(RuntimeError):
        pairs[SOURCE].receive(received, 5.0)
    for pair in pairs.values():
        pair.let_go()


def test_the_store_listens_on_the_given_address_alone() -> None:
    store, address = host_store("localhost", 5.0)
    assert address.startswith("127.0.0.1:")
    joined, own_address = join_store(address, 5.0)
    joined.set("key", "value")
    assert store.get("key") == b"value"
    assert own_address == "127.0.0.1"
    with open("/proc/net/tcp", encoding="ascii") as sockets:
        port = f"{int(address.rpartition(':')[2]):04X}"
        listening = [line.split()[1] for line in sockets if line.split()[3] == "0A"]
    assert [local for local in listening if local.endswith(f":{port}")] == [f"0100007F:{port}"]


def make_pairs() -> dict[int, Pair]:
    store, address = host_store("127.0.0.1", 5.0)
    joined, _ = join_store(address, 5.0)
    pairs: dict[int, Pair] = {}

    def meet(rank: int) -> None:
        pairs[rank] = make_pair({DESTINATION: store, SOURCE: joined}[rank], rank, "127.0.0.1", CPU, 5.0)

    threads = [threading.Thread(target=partial(meet, rank)) for rank in (DESTINATION, SOURCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return pairs
