"""Two processes become a link only if both know the cluster's secret, whatever it runs over."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from common.errors import IncompatiblePeer, PeerLost
from common.identity import Ticket, new_incarnation, new_transfer_id
from common.pb import kv_transfer_pb2 as pb
from common.rpc import bind_port, new_server
from common.transfer_config import TransferConfig
from kv_transfer.factory import make_receiver, make_sender
from kv_transfer.handshake import NONCE_BYTES, greet
from kv_transfer.heads import HeadRange
from kv_transfer.link import Endpoint, PackedPayload
from kv_transfer.loopback import LoopbackNetwork
from kv_transfer.receiver import LinkReceiver
from kv_transfer.sender import LinkSender
from kv_transfer.transport import Destination, Offer
from kv_transfer.wire import PROTOCOL_VERSION
from tests.kv_transfer.wires import CPU, KINDS, new_layout

OURS, THEIRS, NONE = b"the secret of this cluster", b"the secret of another one", b""


@dataclass(frozen=True)
class Ends:
    sender: LinkSender
    receiver: LinkReceiver
    incarnation: str  # the sender's

    async def connect(self, protocol_version: int = PROTOCOL_VERSION) -> None:
        """Raises: what `open` raises."""
        mine = self.receiver.destination
        destination = Destination(mine.incarnation, mine.offers, protocol_version)
        ticket = Ticket(new_transfer_id(), 1, self.incarnation, mine.incarnation, num_tokens=1)
        (await self.sender.open(destination, ticket)).abort()


@asynccontextmanager
async def ends(kind: str, source_secret: bytes, destination_secret: bytes) -> AsyncIterator[Ends]:
    network, incarnation, layout, server = LoopbackNetwork(), new_incarnation(), new_layout(), new_server()
    source = TransferConfig(transport=kind, secret=source_secret)
    destination = TransferConfig(transport=kind, secret=destination_secret)
    sender = make_sender(source, layout, incarnation, CPU, network)
    receiver = make_receiver(destination, layout, new_incarnation(), CPU, network)
    receiver.add_to_server(server)
    await receiver.open(bind_port(server, "127.0.0.1", 0))
    await server.start()
    try:
        yield Ends(sender, receiver, incarnation)
    finally:
        await sender.close()
        await receiver.close()
        await server.stop(grace=None)


@pytest.mark.parametrize("kind", KINDS)
async def test_who_knows_the_secret_connects(kind: str) -> None:
    async with ends(kind, OURS, OURS) as pair:
        await pair.connect()
        assert len(pair.sender.links()) == len(pair.receiver.links()) == 1


@pytest.mark.parametrize(("source", "destination"), [(THEIRS, OURS), (NONE, OURS), (OURS, NONE)])
@pytest.mark.parametrize("kind", KINDS)
async def test_who_does_not_is_refused_and_both_sides_say_so(
    kind: str, source: bytes, destination: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    refusal = (
        "the KV source does not know this cluster's secret; "
        "compare the files that security.secret_file names on both sides"
    )
    async with ends(kind, source, destination) as pair:
        with caplog.at_level(logging.WARNING), pytest.raises(IncompatiblePeer, match=refusal):
            await pair.connect()
        assert pair.sender.links() == pair.receiver.links() == []
        assert pair.receiver.stats.pieces == 0
    said = {record.name: record.getMessage() for record in caplog.records}
    assert refusal in said["kv_transfer.sender"]
    assert said["kv_transfer.receiver"].startswith(f"refused a KV link over {kind}")
    assert not any(secret.decode() in caplog.text for secret in (OURS, THEIRS))


@pytest.mark.parametrize("kind", KINDS)
async def test_speaking_the_old_protocol_is_no_way_around_the_proof(kind: str) -> None:
    """With a secret the destination asks for the proof; without one the source of version 1 has none to give."""
    async with ends(kind, NONE, OURS) as pair:
        with pytest.raises((IncompatiblePeer, PeerLost)):
            await pair.connect(protocol_version=1)
        assert pair.receiver.links() == []


@dataclass
class Stranger:
    """Took a decode worker's address; welcomes everybody, with a proof of its own making."""

    proof: bytes
    heard: list[pb.LinkRequest] = field(default_factory=list)
    is_attached: bool = False
    wire_name: str = "grpc/inline"

    async def pack(self, flat: object) -> PackedPayload:
        raise AssertionError("a piece is being prepared for a stranger")

    async def write(self, request: pb.LinkRequest, payload: object = None) -> None:
        self.heard.append(request)

    async def read(self) -> pb.LinkReply:
        if len(self.heard) == 1:
            return pb.LinkReply(challenge=pb.LinkChallenge(nonce=bytes(NONCE_BYTES)))
        welcome = pb.LinkWelcome(protocol_version=PROTOCOL_VERSION, layout=new_layout().to_pb(), proof=self.proof)
        return pb.LinkReply(welcome=welcome)

    async def attach(self, welcome: pb.LinkWelcome) -> None:
        self.is_attached = True

    async def close(self) -> None: ...


@pytest.mark.parametrize("guess", ["nothing", "noise", "the source's own proof"])
async def test_a_stranger_at_a_decode_workers_address_gets_no_kv(guess: str) -> None:
    layout = new_layout()
    source = Endpoint(layout, new_incarnation(), HeadRange(0, layout.num_kv_heads), OURS)
    destination = Destination("taken over", (Offer("grpc", "127.0.0.1:1"),), PROTOCOL_VERSION)
    stranger = _Mirror(b"") if guess == "the source's own proof" else Stranger(b"" if guess == "nothing" else b"x" * 32)
    with pytest.raises(IncompatiblePeer, match=r"the KV destination does not know .*security\.secret_file"):
        await greet(stranger, source, destination)
    assert [request.WhichOneof("frame") for request in stranger.heard] == ["hello", "proof"]
    assert not stranger.is_attached
    assert not any(OURS in request.SerializeToString() for request in stranger.heard)


class _Mirror(Stranger):
    async def read(self) -> pb.LinkReply:
        self.proof = self.heard[-1].proof.proof
        return await super().read()


async def test_a_proof_is_worth_nothing_on_another_link() -> None:
    """What a stranger overheard of one handshake does not open the next: the destination's number is another."""
    proofs = []
    for nonce in (bytes(NONCE_BYTES), bytes([1]) * NONCE_BYTES):
        stranger = _Challenger(nonce)
        layout = new_layout()
        source = Endpoint(layout, "same", HeadRange(0, layout.num_kv_heads), OURS)
        with pytest.raises(IncompatiblePeer):
            await greet(stranger, source, Destination("same", (Offer("grpc", "a:1"),), PROTOCOL_VERSION))
        proofs.append(stranger.heard[-1].proof.proof)
    assert len(set(proofs)) == 2


class _Challenger(Stranger):
    def __init__(self, nonce: bytes) -> None:
        super().__init__(b"")
        self._nonce = nonce

    async def read(self) -> pb.LinkReply:
        if len(self.heard) == 1:
            return pb.LinkReply(challenge=pb.LinkChallenge(nonce=self._nonce))
        return await super().read()
