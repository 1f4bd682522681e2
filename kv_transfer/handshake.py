"""How two processes become a link: each proves that it knows the cluster secret, then both compare what they are.

    source → hello {who, layout, nonce}     ← challenge {nonce}     → proof     ← welcome {layout, proof, where}

Before the source's proof a destination says nothing but a random number, and a source sends no KV before the
destination's. The proof is HMAC-SHA256(secret, role · both nonces · hello), so that neither replays nor fits another
link. A source of protocol version 1 knows no proof; it is tolerated where there is no secret.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass

from common.errors import IncompatiblePeer, PeerLost, VersionMismatch, WrongSecret
from common.kv_layout import KVLayout
from common.pb import kv_transfer_pb2 as pb
from kv_transfer.checksum import CHECKSUM
from kv_transfer.heads import HeadRange
from kv_transfer.link import DestinationChannel, Endpoint, SourceChannel
from kv_transfer.transport import Destination
from kv_transfer.wire import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION
from kv_transfer.wire_dtype import WireDtype

NONCE_BYTES = 32
_SOURCE, _DESTINATION = b"source", b"destination"
_COMPARE = "compare the files that security.secret_file names on both sides"


@dataclass(frozen=True)
class Agreement:
    """What both ends of a link know of it once it is made."""

    source_incarnation: str
    destination_incarnation: str
    version: int
    source_heads: HeadRange
    destination_heads: HeadRange
    heads: HeadRange  # those that both hold; every piece on the link has exactly these
    credit_bytes: int | None  # None: a peer of version 1 gives and takes none


async def greet(channel: SourceChannel, endpoint: Endpoint, destination: Destination) -> Agreement:
    """The source's side, up to and including `attach`.

    Raises: IncompatiblePeer (naming the field and both values), PeerLost.
    """
    version = min(PROTOCOL_VERSION, destination.protocol_version)
    hello = pb.LinkHello(
        protocol_version=version,
        source_incarnation=endpoint.incarnation,
        destination_incarnation=destination.incarnation,
        layout=endpoint.layout.to_pb(),
        transport=channel.wire_name,
        checksum=CHECKSUM.name,
        nonce=secrets.token_bytes(NONCE_BYTES),
        head_start=endpoint.heads.start,
        head_end=endpoint.heads.end,
        wire_dtype=endpoint.wire_dtype,
    )
    await channel.write(pb.LinkRequest(hello=hello))
    if _is_proven(version, endpoint):
        welcome = await _prove(channel, hello, endpoint.secret)
    else:
        welcome = (await _reply(channel, "welcome")).welcome
    _require_version(welcome.protocol_version)
    _require_same_layout(endpoint, KVLayout.from_pb(welcome.layout))
    await channel.attach(welcome)
    theirs = _heads(welcome.head_start, welcome.head_end, endpoint.layout)
    return _agree(hello, theirs, endpoint.layout, welcome.credit_bytes)


async def _prove(channel: SourceChannel, hello: pb.LinkHello, secret: bytes) -> pb.LinkWelcome:
    nonces = hello.nonce + (await _reply(channel, "challenge")).challenge.nonce
    await channel.write(pb.LinkRequest(proof=pb.LinkProof(proof=_proof(secret, _SOURCE, nonces, hello))))
    welcome = (await _reply(channel, "welcome")).welcome
    if not hmac.compare_digest(welcome.proof, _proof(secret, _DESTINATION, nonces, hello)):
        raise WrongSecret(f"the KV destination does not know this cluster's secret; nothing was sent to it; {_COMPARE}")
    return welcome


async def _reply(channel: SourceChannel, frame: str) -> pb.LinkReply:
    reply = await channel.read()
    if reply.WhichOneof("frame") != frame:
        raise VersionMismatch(f"the KV destination answers with {reply.WhichOneof('frame')} where {frame} is due")
    return reply


async def receive_hello(channel: DestinationChannel, endpoint: Endpoint) -> tuple[pb.LinkHello, bytes]:
    """The destination's side, first half: who calls, and may it? Returns its hello and the proof to welcome it with.

    Raises: IncompatiblePeer, PeerLost.
    """
    request = (await channel.read()).request
    if not request.HasField("hello"):
        raise VersionMismatch("a link begins with hello")
    hello = request.hello
    if not _is_proven(hello.protocol_version, endpoint):
        channel.trust()
        _require_acceptable(hello, endpoint, channel.wire_name)
        return hello, b""
    nonce = secrets.token_bytes(NONCE_BYTES)
    await channel.write(pb.LinkReply(challenge=pb.LinkChallenge(nonce=nonce)))
    nonces = hello.nonce + nonce
    answer = (await channel.read()).request
    if not hmac.compare_digest(answer.proof.proof, _proof(endpoint.secret, _SOURCE, nonces, hello)):
        raise WrongSecret(f"the KV source does not know this cluster's secret; {_COMPARE}")
    channel.trust()
    _require_acceptable(hello, endpoint, channel.wire_name)
    return hello, _proof(endpoint.secret, _DESTINATION, nonces, hello)


def agreed_by_destination(hello: pb.LinkHello, endpoint: Endpoint, credit_bytes: int) -> Agreement:
    return _agree(hello, endpoint.heads, endpoint.layout, credit_bytes)


def new_welcome(endpoint: Endpoint, agreement: Agreement, proof: bytes) -> pb.LinkWelcome:
    """Channels add where payloads go."""
    return pb.LinkWelcome(
        protocol_version=agreement.version,
        layout=endpoint.layout.to_pb(),
        proof=proof,
        credit_bytes=agreement.credit_bytes or 0,
        head_start=endpoint.heads.start,
        head_end=endpoint.heads.end,
    )


def _is_proven(version: int, endpoint: Endpoint) -> bool:
    """Whether this link begins with proofs; with a secret there is no way around them."""
    return version >= 2 or endpoint.secret != b""


def _proof(secret: bytes, role: bytes, nonces: bytes, hello: pb.LinkHello) -> bytes:
    return hmac.digest(secret, role + nonces + hello.SerializeToString(deterministic=True), "sha256")


def _agree(hello: pb.LinkHello, destination_heads: HeadRange, layout: KVLayout, credit_bytes: int) -> Agreement:
    version = min(hello.protocol_version, PROTOCOL_VERSION)
    source_heads = _heads(hello.head_start, hello.head_end, layout)
    shared = source_heads.overlap(destination_heads)
    if shared is None:
        raise IncompatiblePeer(
            f"no KV head is on both sides: the source holds {source_heads}, the destination {destination_heads}"
        )
    return Agreement(
        hello.source_incarnation,
        hello.destination_incarnation,
        version,
        source_heads,
        destination_heads,
        shared,
        credit_bytes if version >= 2 else None,
    )


def _heads(start: int, end: int, layout: KVLayout) -> HeadRange:
    return HeadRange(start, end) if end else HeadRange(0, layout.num_kv_heads)


def _require_acceptable(hello: pb.LinkHello, mine: Endpoint, wire_name: str) -> None:
    _require_version(hello.protocol_version)
    if hello.destination_incarnation != mine.incarnation:
        raise PeerLost(f"this address is now incarnation {mine.incarnation}, not {hello.destination_incarnation}")
    if hello.transport != wire_name:
        raise VersionMismatch(
            f"transports differ: this side receives over {wire_name!r}, the source has {hello.transport!r}"
        )
    if hello.checksum != CHECKSUM.name:
        raise VersionMismatch(
            f"checksums differ: this side computes {CHECKSUM.name!r}, the source {hello.checksum!r}; "
            "install the package xxhash on both sides or on neither"
        )
    theirs = hello.wire_dtype or WireDtype.SAME
    if theirs != mine.wire_dtype:
        raise VersionMismatch(
            f"transfer.wire_dtype differs: this side has {str(mine.wire_dtype)!r}, the source {str(theirs)!r}"
        )
    _require_same_layout(mine, KVLayout.from_pb(hello.layout))


def _require_version(version: int) -> None:
    if version < OLDEST_PROTOCOL_VERSION:
        raise VersionMismatch(
            f"KV transfer protocol versions differ: this side speaks {OLDEST_PROTOCOL_VERSION} to {PROTOCOL_VERSION}, "
            f"the peer {version}"
        )


def _require_same_layout(mine: Endpoint, theirs: KVLayout) -> None:
    """The dtypes may differ where pieces are encoded in neither."""
    if mine.wire_dtype is not WireDtype.SAME:
        theirs = theirs.with_dtype(mine.layout.dtype)
    mine.layout.require_compatible(theirs)
