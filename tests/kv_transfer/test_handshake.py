"""Who may make a link: strangers learn nothing, older peers are welcome where nothing is secret, the rest is named."""

from __future__ import annotations

import asyncio
import hmac
import struct
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from common.errors import IncompatiblePeer, PeerLost, ServingError
from common.identity import Ticket, new_incarnation, new_transfer_id
from common.kv_layout import KVLayout
from common.pb import kv_transfer_pb2 as pb
from common.transfer_config import TransferConfig
from kv_transfer.checksum import CHECKSUM
from kv_transfer.handshake import NONCE_BYTES
from kv_transfer.heads import HeadRange
from kv_transfer.link import DestinationChannel, Endpoint, PackedPayload, SourceChannel, Way
from kv_transfer.loopback import LoopbackStream
from kv_transfer.meeting_point import CONTROL
from kv_transfer.receiver import LinkReceiver
from kv_transfer.sender import LinkSender
from kv_transfer.transport import KVPiece, OnPiece, Release
from kv_transfer.wire import PROTOCOL_VERSION, checksum_of, describe, flat_bytes
from kv_transfer.wire_dtype import WireDtype
from tests.kv_transfer.ends import HOST_KINDS, ends_of
from tests.kv_transfer.wires import TIMEOUT_S, new_layout

SECRET = b"the cluster's"
LAYOUT = new_layout()
HEADS = HeadRange(0, LAYOUT.num_kv_heads)
DATA = torch.arange(LAYOUT.num_layers * 2 * 4 * 2 * 8, dtype=torch.float32).view(LAYOUT.num_layers, 2, 4, 2, 8)


def endpoint(secret: bytes = b"", layout: KVLayout = LAYOUT, wire_dtype: WireDtype = WireDtype.SAME) -> Endpoint:
    return Endpoint(layout, new_incarnation(), HEADS, secret, wire_dtype)


def hello_to(receiver: LinkReceiver, version: int, **fields: object) -> pb.LinkHello:
    wire = "loopback/inline" if receiver.destination.offers[0].transport == "loopback" else "tcp"
    hello = pb.LinkHello(
        protocol_version=version,
        source_incarnation="a-source",
        destination_incarnation=receiver.destination.incarnation,
        layout=LAYOUT.to_pb(),
        transport=wire,
        checksum=CHECKSUM.name,
    )
    hello.MergeFrom(pb.LinkHello(**fields))  # type: ignore[arg-type]
    return hello


def ticket_for(receiver: LinkReceiver, source: str) -> Ticket:
    return Ticket(new_transfer_id(), 1, source, receiver.destination.incarnation, DATA.shape[2])


def keeping(landed: list[torch.Tensor]) -> OnPiece:
    def keep(piece: KVPiece, release: Release) -> None:
        landed.append(piece.data.clone())
        release()

    return keep


async def assert_it_transfers(
    sender: LinkSender, source: Endpoint, receiver: LinkReceiver, version: int = PROTOCOL_VERSION
) -> None:
    ticket = ticket_for(receiver, source.incarnation)
    landed: list[torch.Tensor] = []
    reception = receiver.expect(ticket.transfer_id, ticket.num_tokens, 0, keeping(landed))
    transfer = await sender.open(replace(receiver.destination, protocol_version=version), ticket)
    transfer.send(KVPiece(0, 0, DATA))
    await transfer.commit(5, TIMEOUT_S)
    assert (await reception.committed()).first_token == 5
    assert torch.equal(landed[0], DATA)


async def replies_on(stream: LoopbackStream) -> list[pb.LinkReply]:
    """All that the destination says, up to its end, which says nothing of who it is."""
    replies: list[pb.LinkReply] = []
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                replies.append(await stream.read())
    except ServingError:
        return replies
    finally:
        await stream.close()


# ---------------------------------------------------------------- strangers


STRANGERS: list[Callable[[LinkReceiver], list[pb.LinkRequest]]] = [
    lambda receiver: [pb.LinkRequest()],
    lambda receiver: [pb.LinkRequest(piece=pb.Piece(num_bytes=1 << 40))],
    lambda receiver: [pb.LinkRequest(commit=pb.Commit(first_token=1))],
    lambda receiver: [pb.LinkRequest(proof=pb.LinkProof(proof=b"x" * 32))],
    lambda receiver: [pb.LinkRequest(hello=pb.LinkHello())] * 2,
    lambda receiver: [pb.LinkRequest(hello=hello_to(receiver, 1))] * 2,
    lambda receiver: [pb.LinkRequest(hello=hello_to(receiver, 2)), pb.LinkRequest(proof=pb.LinkProof(proof=b"x" * 32))],
    lambda receiver: [pb.LinkRequest(hello=hello_to(receiver, 99)), pb.LinkRequest()],
]


@pytest.mark.parametrize("number", range(len(STRANGERS)))
async def test_a_stranger_hears_32_random_bytes_at_most(number: int) -> None:
    async with ends_of("loopback") as ends:
        receiver = await ends.receiver(endpoint(SECRET))
        heard: list[bytes] = []
        for _ in range(2):
            stream = ends.network.dial(receiver.destination.offers[0].address)
            for request in STRANGERS[number](receiver):
                await stream.write(request)
            replies = await replies_on(stream)
            for reply in replies:
                nonce = reply.challenge.nonce
                assert reply == pb.LinkReply(challenge=pb.LinkChallenge(nonce=nonce))
                assert len(nonce) == NONCE_BYTES
                heard.append(nonce)
            assert len(replies) <= 1
        assert len(set(heard)) == len(heard), "a nonce came twice"
        assert receiver.links() == []


async def bytes_from(receiver: LinkReceiver, sent: bytes) -> bytes:
    """All that a tcp destination ever says to somebody who sends this."""
    host, _, port = receiver.destination.offers[0].address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(TIMEOUT_S):
            writer.write(sent)
            await writer.drain()
            writer.write_eof()
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


def framed(*requests: pb.LinkRequest) -> bytes:
    messages = [request.SerializeToString() for request in requests]
    return CONTROL + b"".join(struct.pack("<I", len(message)) + message for message in messages)


@pytest.mark.parametrize(
    "rubbish",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00" * 1000,
        CONTROL,
        CONTROL + b"\xff" * 64,
        CONTROL + struct.pack("<I", 12) + b"\xff" * 12,
        b"pdKD" + b"\x00" * 32,
        framed(pb.LinkRequest(commit=pb.Commit(first_token=3))),
    ],
)
async def test_rubbish_at_a_tcp_port_is_answered_with_nothing(rubbish: bytes) -> None:
    async with ends_of("tcp") as ends:
        receiver = await ends.receiver(endpoint(SECRET))
        assert await bytes_from(receiver, rubbish) == b""


async def test_a_hello_at_a_tcp_port_is_answered_with_a_challenge_to_the_byte() -> None:
    async with ends_of("tcp") as ends:
        receiver = await ends.receiver(endpoint(SECRET))
        heard = await bytes_from(receiver, framed(pb.LinkRequest(hello=hello_to(receiver, 2, nonce=b"n" * 32))))
        nonce = heard[-NONCE_BYTES:]
        message = pb.LinkReply(challenge=pb.LinkChallenge(nonce=nonce)).SerializeToString()
        assert heard == struct.pack("<I", len(message)) + message


class Recorder:
    """A SourceChannel that keeps what its source said."""

    def __init__(self, inner: SourceChannel, said: list[pb.LinkRequest]) -> None:
        self._inner = inner
        self._said = said
        self.wire_name = inner.wire_name

    async def pack(self, flat: torch.Tensor) -> PackedPayload:
        return await self._inner.pack(flat)

    async def write(self, request: pb.LinkRequest, payload: torch.Tensor | None = None) -> None:
        self._said.append(pb.LinkRequest.FromString(request.SerializeToString()))
        await self._inner.write(request, payload)

    async def read(self) -> pb.LinkReply:
        return await self._inner.read()

    async def attach(self, welcome: pb.LinkWelcome) -> None:
        await self._inner.attach(welcome)

    async def close(self) -> None:
        await self._inner.close()


async def test_a_hello_and_a_proof_that_were_overheard_open_no_second_link() -> None:
    async with ends_of("loopback") as ends:
        receiver, source = await ends.receiver(endpoint(SECRET)), endpoint(SECRET)
        said: list[pb.LinkRequest] = []
        way = ends.way
        sender = LinkSender(source, [Way("loopback", lambda address: Recorder(way.dial(address), said))], ends.config)
        await assert_it_transfers(sender, source, receiver)
        hello, proof = said[:2]
        assert (hello.WhichOneof("frame"), proof.WhichOneof("frame")) == ("hello", "proof")
        stream = ends.network.dial(receiver.destination.offers[0].address)
        await stream.write(hello)
        await stream.write(proof)
        assert [reply.WhichOneof("frame") for reply in await replies_on(stream)] == ["challenge"]
        await sender.close()


@pytest.mark.parametrize(("mine", "theirs"), [(b"wrong", SECRET), (b"", SECRET), (SECRET, b"wrong"), (SECRET, b"")])
async def test_who_does_not_know_the_secret_gets_no_link(mine: bytes, theirs: bytes) -> None:
    async with ends_of("loopback") as ends:
        receiver, source = await ends.receiver(endpoint(theirs)), endpoint(mine)
        with pytest.raises((IncompatiblePeer, ServingError), match="secret"):
            await ends.sender(source).open(receiver.destination, ticket_for(receiver, source.incarnation))
        assert receiver.links() == []


# ---------------------------------------------------------------- older peers


async def test_a_source_of_version_1_is_served_where_there_is_no_secret() -> None:
    """Written out frame by frame: it knows no nonce, no heads, no credit, and a commit without the first token."""
    async with ends_of("loopback") as ends:
        receiver = await ends.receiver(endpoint())
        ticket = ticket_for(receiver, "a-source")
        landed: list[torch.Tensor] = []
        reception = receiver.expect(ticket.transfer_id, ticket.num_tokens, 0, keeping(landed))
        stream = ends.network.dial(receiver.destination.offers[0].address)
        await stream.write(pb.LinkRequest(hello=hello_to(receiver, 1)))
        welcome = (await stream.read()).welcome
        assert (welcome.protocol_version, welcome.proof, welcome.credit_bytes) == (1, b"", 0)
        await send_the_old_way(stream, ticket, struct.pack("<Q", checksum_of(flat_bytes(DATA))))
        assert (await stream.read()).commit_result.is_accepted
        assert (await reception.committed()).first_token == 9
        assert torch.equal(landed[0], DATA)
        await stream.close()


async def test_a_source_of_version_2_is_served() -> None:
    """Written out frame by frame: its commit covers the checksums of its pieces, and the first token."""
    async with ends_of("loopback") as ends:
        receiver = await ends.receiver(endpoint(SECRET))
        ticket = ticket_for(receiver, "a-source")
        landed: list[torch.Tensor] = []
        reception = receiver.expect(ticket.transfer_id, ticket.num_tokens, 0, keeping(landed))
        stream = ends.network.dial(receiver.destination.offers[0].address)
        hello = hello_to(receiver, 2, nonce=b"n" * NONCE_BYTES)
        await stream.write(pb.LinkRequest(hello=hello))
        signed = b"source" + hello.nonce + (await stream.read()).challenge.nonce
        proof = hmac.digest(SECRET, signed + hello.SerializeToString(deterministic=True), "sha256")
        await stream.write(pb.LinkRequest(proof=pb.LinkProof(proof=proof)))
        welcome = (await stream.read()).welcome
        assert (welcome.protocol_version, welcome.credit_bytes > 0) == (2, True)
        await send_the_old_way(stream, ticket, struct.pack("<QI", checksum_of(flat_bytes(DATA)), 9))
        assert (await stream.read()).commit_result.is_accepted
        assert (await reception.committed()).first_token == 9
        assert torch.equal(landed[0], DATA)
        await stream.close()


async def send_the_old_way(stream: LoopbackStream, ticket: Ticket, sealed: bytes) -> None:
    """All of DATA as one piece. sealed: what the commit's checksum covers."""
    flat = flat_bytes(DATA)
    piece = describe(ticket, KVPiece(0, 0, DATA), flat.numel(), checksum_of(flat)).to_pb()
    piece.payload = flat.numpy().tobytes()
    await stream.write(pb.LinkRequest(piece=piece))
    checksum = CHECKSUM.of(sealed)
    commit = pb.Commit(ticket=ticket.to_pb(), num_pieces=1, num_bytes=flat.numel(), checksum=checksum, first_token=9)
    await stream.write(pb.LinkRequest(commit=commit))


async def test_a_source_of_version_1_is_challenged_where_there_is_a_secret() -> None:
    async with ends_of("loopback") as ends:
        receiver = await ends.receiver(endpoint(SECRET))
        stream = ends.network.dial(receiver.destination.offers[0].address)
        await stream.write(pb.LinkRequest(hello=hello_to(receiver, 1)))
        assert (await stream.read()).WhichOneof("frame") == "challenge"
        await stream.write(pb.LinkRequest(commit=pb.Commit()))  # what an old peer would go on with
        assert await replies_on(stream) == []


@pytest.mark.parametrize("kind", ["loopback", "grpc"])
async def test_a_destination_of_version_1_is_spoken_to_in_version_1(kind: str) -> None:
    async with ends_of(kind) as ends:
        receiver, source = await ends.receiver(endpoint()), endpoint()
        await assert_it_transfers(ends.sender(source), source, receiver, version=1)


@pytest.mark.parametrize("kind", HOST_KINDS)
async def test_a_destination_of_version_2_is_told_each_checksum_beforehand_and_all_of_them_in_the_commit(
    kind: str,
) -> None:
    async with ends_of(kind) as ends:
        receiver, source = await ends.receiver(endpoint(SECRET)), endpoint(SECRET)
        said: list[pb.LinkRequest] = []
        way = ends.way
        sender = LinkSender(source, [Way(kind, lambda address: Recorder(way.dial(address), said))], ends.config)
        await assert_it_transfers(sender, source, receiver, version=2)
        [piece] = [frame.piece for frame in said if frame.piece.num_bytes == DATA.numel() * 4]
        assert piece.checksum == checksum_of(flat_bytes(DATA))
        assert said[-1].commit.checksum == CHECKSUM.of(struct.pack("<QI", piece.checksum, 5))
        await sender.close()


async def test_a_destination_of_version_1_gets_no_kv_from_a_source_with_a_secret() -> None:
    """An old destination answers the hello with a welcome at once."""

    async def serve_the_old_way(channel: DestinationChannel) -> None:
        welcome = pb.LinkWelcome(protocol_version=1, layout=LAYOUT.to_pb())
        await channel.write(pb.LinkReply(welcome=welcome))
        await asyncio.Event().wait()

    async with ends_of("loopback") as ends:
        source, old = endpoint(SECRET), await ends.receiver(endpoint())
        ends.network.listen(serve_the_old_way, old.destination.offers[0].address)
        with pytest.raises(IncompatiblePeer, match="challenge is due"):
            await ends.sender(source).open(
                replace(old.destination, protocol_version=1), ticket_for(old, source.incarnation)
            )


# ---------------------------------------------------------------- what is named


@pytest.mark.parametrize("kind", HOST_KINDS)
@pytest.mark.parametrize(("field", "theirs"), [("num_kv_heads", 4), ("rope", "yarn"), ("dtype", "float16")])
async def test_a_layout_that_differs_is_named_with_both_values(kind: str, field: str, theirs: object) -> None:
    other = replace(LAYOUT, **{field: theirs})  # type: ignore[arg-type]
    async with ends_of(kind) as ends:
        receiver, source = await ends.receiver(endpoint(SECRET)), endpoint(SECRET, other)
        mine = getattr(LAYOUT, field)
        with pytest.raises(
            IncompatiblePeer, match=f"differ in {field}: this side has {mine!r}, the peer has {theirs!r}"
        ):
            await ends.sender(source).open(receiver.destination, ticket_for(receiver, source.incarnation))


@pytest.mark.parametrize("kind", HOST_KINDS)
async def test_one_link_too_many_is_refused_with_the_setting_to_change(kind: str) -> None:
    async with ends_of(kind) as ends:
        receiver = await ends.receiver(endpoint(), TransferConfig(transport=kind, max_links=1))
        first, second = endpoint(), endpoint()
        first_sender = ends.sender(first)
        await assert_it_transfers(first_sender, first, receiver)
        with pytest.raises(PeerLost, match=r"1 KV links are open; raise transfer\.max_links"):
            await ends.sender(second).open(receiver.destination, ticket_for(receiver, second.incarnation))
        await assert_it_transfers(first_sender, first, receiver)  # which harms nobody


# ---------------------------------------------------------------- encodings


ERROR_BOUND: dict[WireDtype, Callable[[torch.Tensor], torch.Tensor]] = {
    WireDtype.INT8: lambda x: (x.abs().amax(-1, keepdim=True) / 254).expand_as(x),
    WireDtype.FP8: lambda x: torch.maximum(x.abs() / 16, x.abs().amax(-1, keepdim=True) / 448 / 1024),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.mark.parametrize("kind", HOST_KINDS)
@pytest.mark.parametrize("wire_dtype", list(ERROR_BOUND))
@pytest.mark.parametrize(("mine", "theirs"), [("float32", "float32"), ("bfloat16", "float32"), ("float32", "float16")])
async def test_an_encoding_keeps_its_error_bound_also_between_unlike_dtypes(
    kind: str, wire_dtype: WireDtype, mine: str, theirs: str
) -> None:
    async with ends_of(kind) as ends:
        source = endpoint(layout=LAYOUT.with_dtype(mine), wire_dtype=wire_dtype)
        receiver = await ends.receiver(endpoint(layout=LAYOUT.with_dtype(theirs), wire_dtype=wire_dtype))
        sent = torch.randn(DATA.shape, generator=torch.Generator().manual_seed(3)).to(DTYPES[mine])
        ticket = ticket_for(receiver, source.incarnation)
        landed: list[torch.Tensor] = []
        receiver.expect(ticket.transfer_id, ticket.num_tokens, 0, keeping(landed))
        transfer = await ends.sender(source).open(receiver.destination, ticket)
        transfer.send(KVPiece(0, 0, sent))
        receipt = await transfer.commit(1, TIMEOUT_S)
        assert receipt.num_bytes == sent.numel() // LAYOUT.head_dim * (LAYOUT.head_dim + 4)
        assert landed[0].dtype == DTYPES[theirs]
        exact, got = sent.float(), landed[0].float()
        rounding = exact.abs() * torch.finfo(DTYPES[theirs]).eps
        assert bool(((got - exact).abs() <= ERROR_BOUND[wire_dtype](exact) * 1.0001 + rounding).all())


@pytest.mark.parametrize("kind", HOST_KINDS)
async def test_unlike_encodings_are_named(kind: str) -> None:
    async with ends_of(kind) as ends:
        receiver, source = await ends.receiver(endpoint(wire_dtype=WireDtype.INT8)), endpoint(wire_dtype=WireDtype.FP8)
        with pytest.raises(IncompatiblePeer, match="wire_dtype differs: this side has 'int8', the source 'fp8'"):
            await ends.sender(source).open(receiver.destination, ticket_for(receiver, source.incarnation))
