"""What every transport promises, over every kind of it."""

from __future__ import annotations

import asyncio
import random
import threading
import zlib
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from common.errors import (
    CorruptPiece,
    IncompatiblePeer,
    InvalidRequest,
    LayoutMismatch,
    PeerLost,
    TransferAborted,
    TransferTimeout,
    VersionMismatch,
)
from common.pb import kv_transfer_pb2 as pb
from kv_transfer.checksum import Checksum
from kv_transfer.link import Arrival
from kv_transfer.plan import LayerGroups
from kv_transfer.sender import LinkSender
from kv_transfer.transport import KVPiece, Offer, OutgoingTransfer, Release
from kv_transfer.wire import PROBE_ID
from tests.kv_transfer.faults import flipped
from tests.kv_transfer.wires import KINDS, Held, NewWire, Wire, new_layout, until

TIMEOUT_S = 5.0


def cut(data: Tensor, token_start: int = 0) -> list[KVPiece]:
    """One piece per layer and per half of the tokens, as two prefill chunks would make them."""
    num_layers, middle = data.shape[0], max(1, data.shape[2] // 2)
    return [
        KVPiece(layer, token_start + start, data[layer : layer + 1, :, start:end].contiguous())
        for start, end in ((0, middle), (middle, data.shape[2]))
        if start < end
        for layer in range(num_layers)
    ]


def send_all(transfer: OutgoingTransfer, pieces: list[KVPiece]) -> None:
    for piece in pieces:
        transfer.send(piece)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", KINDS)
async def test_bytes_arrive_equal(kind: str, dtype: str, new_wire: NewWire) -> None:
    wire = await new_wire(kind, new_layout(dtype))
    landing, ticket = wire.expect(num_tokens=33)
    data = wire.new_data(33)
    transfer = await wire.sender.open(wire.receiver.destination, ticket)
    send_all(transfer, cut(data))
    receipt = await transfer.commit(7, TIMEOUT_S)
    committed = await landing.reception.committed()
    assert torch.equal(landing.data, data)
    assert committed.first_token == 7
    assert committed.ticket == ticket
    assert committed.receipt == receipt
    assert (receipt.num_pieces, receipt.num_bytes) == (8, data.numel() * data.element_size())
    assert wire.sender.stats.transfers_committed == wire.receiver.stats.transfers_committed == 1
    assert wire.receiver.stats.bytes == wire.sender.stats.bytes == receipt.num_bytes
    assert wire.receiver.stats.pieces_rejected == {}


async def test_pieces_as_the_plan_cuts_them_arrive_from_another_thread(wire: Wire) -> None:
    landing, ticket = wire.expect(num_tokens=40)
    data = wire.new_data(40)
    transfer = await wire.sender.open(wire.receiver.destination, ticket)

    def compute() -> None:
        for chunk_start, chunk_end in ((0, 24), (24, 40)):
            groups = LayerGroups(wire.layout, chunk_end - chunk_start, piece_bytes=4096)
            for layer in range(wire.layout.num_layers):
                for cut in groups.ready_after(layer):
                    start, end = chunk_start + cut.token_start, chunk_start + cut.token_end
                    part = data[cut.layer_start : cut.layer_end, :, start:end].contiguous()
                    transfer.send(KVPiece(cut.layer_start, start, part))

    engine = threading.Thread(target=compute)
    engine.start()
    await asyncio.to_thread(engine.join)
    await transfer.commit(1, TIMEOUT_S)
    assert torch.equal(landing.data, data)


async def test_pieces_in_any_order_are_accepted(wire: Wire) -> None:
    landing, ticket = wire.expect(num_tokens=9)
    data = wire.new_data(9)
    pieces = cut(data)
    random.Random(0).shuffle(pieces)
    transfer = await wire.sender.open(wire.receiver.destination, ticket)
    send_all(transfer, pieces)
    await transfer.commit(1, TIMEOUT_S)
    assert torch.equal(landing.data, data)


async def test_interleaved_transfers_do_not_mix(wire: Wire) -> None:
    expected = [wire.expect(num_tokens=tokens) for tokens in (1, 5, 17, 64)]
    datas = [wire.new_data(ticket.num_tokens, seed) for seed, (_, ticket) in enumerate(expected)]
    transfers = await asyncio.gather(*(wire.sender.open(wire.receiver.destination, ticket) for _, ticket in expected))
    sends = [(transfer, piece) for transfer, data in zip(transfers, datas, strict=True) for piece in cut(data)]
    random.Random(1).shuffle(sends)
    for transfer, piece in sends:
        transfer.send(piece)
    await asyncio.gather(*(transfer.commit(index, TIMEOUT_S) for index, transfer in enumerate(transfers)))
    for index, ((landing, _), data) in enumerate(zip(expected, datas, strict=True)):
        assert torch.equal(landing.data, data)
        assert (await landing.reception.committed()).first_token == index


@pytest.mark.parametrize("num_tokens", [0, 16])
async def test_nothing_to_send_is_a_commit_alone(wire: Wire, num_tokens: int) -> None:
    landing, ticket = wire.expect(num_tokens=num_tokens, skip_tokens=num_tokens)
    transfer = await wire.sender.open(wire.receiver.destination, ticket)
    receipt = await transfer.commit(5, TIMEOUT_S)
    assert (await landing.reception.committed()).first_token == 5
    assert (receipt.num_pieces, receipt.num_bytes, landing.pieces) == (0, 0, [])


async def test_a_skipped_prefix_is_neither_sent_nor_awaited(wire: Wire) -> None:
    landing, ticket = wire.expect(num_tokens=20, skip_tokens=16)
    data = wire.new_data(4)
    transfer = await wire.sender.open(wire.receiver.destination, ticket)
    send_all(transfer, cut(data, token_start=16))
    await transfer.commit(1, TIMEOUT_S)
    assert torch.equal(landing.data[:, :, 16:], data)
    assert not landing.data[:, :, :16].any()


async def test_a_skipped_token_that_is_sent_all_the_same_is_refused(wire: Wire) -> None:
    _, ticket = wire.expect(num_tokens=20, skip_tokens=16)
    transfer = await wire.sender.open(wire.receiver.destination, ticket)
    send_all(transfer, cut(wire.new_data(5), token_start=15))
    with pytest.raises(CorruptPiece, match="not within"):
        await transfer.commit(1, TIMEOUT_S)
    assert wire.receiver.stats.pieces_rejected == {"range": 1}


async def test_the_same_piece_twice_fails_the_attempt_and_the_next_one_succeeds(wire: Wire) -> None:
    landing, ticket = wire.expect(num_tokens=6)
    data = wire.new_data(6)
    first = await wire.sender.open(wire.receiver.destination, ticket)
    send_all(first, [cut(data)[0], *cut(data)])
    with pytest.raises(CorruptPiece, match="overlaps"):
        await first.commit(1, TIMEOUT_S)
    assert wire.receiver.stats.pieces_rejected == {"overlap": 1}

    second = await wire.sender.open(wire.receiver.destination, replace(ticket, attempt=2))
    send_all(second, cut(data))
    await second.commit(2, TIMEOUT_S)
    committed = await landing.reception.committed()
    assert (committed.ticket.attempt, committed.first_token) == (2, 2)
    assert torch.equal(landing.data, data)
    assert wire.receiver.stats.transfers_failed == wire.sender.stats.transfers_failed == 1


async def test_a_missing_piece_is_found_at_the_commit(wire: Wire) -> None:
    landing, ticket = wire.expect(num_tokens=6)
    transfer = await wire.sender.open(wire.receiver.destination, ticket)
    send_all(transfer, cut(wire.new_data(6))[1:])
    with pytest.raises(CorruptPiece, match="arrived before the commit"):
        await transfer.commit(1, TIMEOUT_S)
    assert wire.receiver.stats.pieces_rejected == {"incomplete": 1}
    await assert_still_waiting(landing.reception.committed())


@pytest.mark.parametrize(
    ("field", "reason"),
    [("token_start", "size"), ("layer_end", "size")],
)
@pytest.mark.parametrize("kind", ["loopback", "grpc", "tcp", "shm"])
async def test_a_header_that_does_not_fit_its_payload_is_refused(
    kind: str, field: str, reason: str, new_wire: NewWire
) -> None:
    wire = await new_wire(kind)
    await send_with_fault(wire, lambda piece: setattr(piece, field, getattr(piece, field) + 1), CorruptPiece)
    assert wire.receiver.stats.pieces_rejected == {reason: 1}


@pytest.mark.parametrize("kind", ["loopback", "grpc", "tcp", "shm"])
async def test_a_truncated_payload_is_refused(kind: str, new_wire: NewWire) -> None:
    wire = await new_wire(kind)
    await send_with_fault(wire, None, CorruptPiece, damage=lambda payload: payload[:-1])
    assert wire.receiver.stats.pieces_rejected == {"size": 1}


async def test_a_flipped_bit_is_refused(wire: Wire) -> None:
    def flip(arrival: Arrival) -> Arrival:
        assert arrival.payload is not None
        return replace(arrival, payload=flipped(arrival.payload, bit=9))

    await receive_with_fault(wire, flip)
    assert wire.receiver.stats.pieces_rejected == {"checksum": 1}


async def test_a_payload_of_another_checksum_is_refused(wire: Wire) -> None:
    def lie(arrival: Arrival) -> Arrival:
        arrival.request.piece.checksum ^= 1
        return arrival

    await receive_with_fault(wire, lie)
    assert wire.receiver.stats.pieces_rejected == {"checksum": 1}


@pytest.mark.parametrize("kind", ["torch_dist"])
async def test_a_size_that_cannot_be_drained_ends_the_link_not_the_process(kind: str, new_wire: NewWire) -> None:
    wire = await new_wire(kind)
    await send_with_fault(wire, lambda piece: setattr(piece, "num_bytes", piece.num_bytes - 8), PeerLost)


@pytest.mark.parametrize("field", ["source_incarnation", "destination_incarnation"])
async def test_a_piece_in_another_processs_name_is_refused(wire: Wire, field: str) -> None:
    await send_with_fault(wire, lambda piece: setattr(piece.ticket, field, "somebody"), CorruptPiece)
    assert wire.receiver.stats.pieces_rejected == {"identity": 1, "incomplete": 1}


async def test_pieces_for_an_unknown_transfer_are_counted_and_the_source_is_told(wire: Wire) -> None:
    landing, ticket = wire.expect(num_tokens=8)
    landing.reception.close()
    transfer = await wire.sender.open(wire.receiver.destination, ticket)
    send_all(transfer, cut(wire.new_data(8)))
    with pytest.raises(TransferAborted):
        await transfer.commit(1, TIMEOUT_S)
    await until(lambda: wire.receiver.stats.stale_pieces >= 1, "a stale piece counted")
    assert landing.pieces == []
    assert wire.receiver.stats.pieces_rejected == {}
    await assert_link_works(wire)


async def test_pieces_after_the_reception_closed_are_stale(wire: Wire) -> None:
    landing, ticket = wire.expect(num_tokens=8)
    transfer = await wire.sender.open(wire.receiver.destination, ticket)
    pieces = cut(wire.new_data(8))
    transfer.send(pieces[0])
    await until(lambda: len(landing.pieces) == 1, "the first piece")
    landing.reception.close()
    landing.reception.close()
    send_all(transfer, pieces[1:])
    with pytest.raises(TransferAborted):
        await transfer.commit(1, TIMEOUT_S)
    assert len(landing.pieces) == 1
    with pytest.raises(TransferAborted):
        await landing.reception.committed()


async def test_closing_a_reception_ends_the_wait_for_it(wire: Wire) -> None:
    landing, _ = wire.expect(num_tokens=8)
    waiting = asyncio.create_task(landing.reception.committed())
    await asyncio.sleep(0)
    landing.reception.close()
    with pytest.raises(TransferAborted):
        await waiting


async def test_a_reception_may_close_while_a_piece_is_handed_over(wire: Wire) -> None:
    landing, ticket = wire.expect(num_tokens=8)
    landing.reception.close()

    def keep_one(piece: KVPiece, release: Release) -> None:
        landing.on_piece(piece, release)
        again.close()

    again = wire.receiver.expect(ticket.transfer_id, 8, 0, keep_one)
    transfer = await wire.sender.open(wire.receiver.destination, ticket)
    send_all(transfer, cut(wire.new_data(8)))
    with pytest.raises(TransferAborted):
        await transfer.commit(1, TIMEOUT_S)
    assert len(landing.pieces) == 1


async def test_a_later_attempt_replaces_an_earlier_one(wire: Wire) -> None:
    landing, ticket = wire.expect(num_tokens=8)
    old_data, new_data = wire.new_data(8, seed=1), wire.new_data(8, seed=2)
    old = await wire.sender.open(wire.receiver.destination, ticket)
    send_all(old, cut(old_data)[:3])
    await until(lambda: len(landing.pieces) == 3, "three pieces of the first attempt")
    new = await wire.sender.open(wire.receiver.destination, replace(ticket, attempt=2))
    send_all(new, cut(new_data)[:1])
    await until(lambda: len(landing.pieces) == 4, "a piece of the second attempt")
    send_all(old, cut(old_data)[3:])
    with pytest.raises(TransferAborted):
        await old.commit(1, TIMEOUT_S)
    assert wire.receiver.stats.stale_pieces >= 1
    send_all(new, cut(new_data)[1:])
    await new.commit(2, TIMEOUT_S)
    assert torch.equal(landing.data, new_data)
    assert (await landing.reception.committed()).ticket.attempt == 2


async def test_an_attempt_is_begun_once(wire: Wire) -> None:
    _, ticket = wire.expect(num_tokens=8)
    await wire.sender.open(wire.receiver.destination, ticket)
    with pytest.raises(InvalidRequest, match="under way"):
        await wire.sender.open(wire.receiver.destination, ticket)


async def test_a_transfer_is_expected_once(wire: Wire) -> None:
    _, ticket = wire.expect(num_tokens=8)
    with pytest.raises(InvalidRequest, match="expected already"):
        wire.receiver.expect(ticket.transfer_id, 8, 0, lambda piece, release: None)


@pytest.mark.parametrize("num_sent", [0, 3, 8])
async def test_an_aborted_attempt_leaves_room_for_the_next(wire: Wire, num_sent: int) -> None:
    landing, ticket = wire.expect(num_tokens=8)
    data = wire.new_data(8)
    first = await wire.sender.open(wire.receiver.destination, ticket)
    send_all(first, cut(data)[:num_sent])
    first.abort()
    first.abort()
    first.send(cut(data)[0])
    with pytest.raises(TransferAborted):
        await first.commit(1, TIMEOUT_S)
    second = await wire.sender.open(wire.receiver.destination, replace(ticket, attempt=2))
    send_all(second, cut(data))
    await second.commit(2, TIMEOUT_S)
    assert torch.equal(landing.data, data)
    assert (await landing.reception.committed()).first_token == 2


async def test_abort_after_the_commit_changes_nothing(wire: Wire) -> None:
    landing, ticket = wire.expect(num_tokens=8)
    transfer = await wire.sender.open(wire.receiver.destination, ticket)
    send_all(transfer, cut(wire.new_data(8)))
    await transfer.commit(4, TIMEOUT_S)
    transfer.abort()
    await assert_link_works(wire)
    assert (await landing.reception.committed()).first_token == 4


async def test_a_cancelled_commit_aborts_the_transfer(wire: Wire) -> None:
    sender = wire.new_sender(fault=drop_commits)
    landing, ticket = wire.expect(num_tokens=8)
    transfer = await sender.open(wire.receiver.destination, ticket)
    send_all(transfer, cut(wire.new_data(8)))
    committing = asyncio.create_task(transfer.commit(4, TIMEOUT_S))
    await until(lambda: len(landing.pieces) == 8, "all pieces")
    committing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await committing
    await assert_still_waiting(landing.reception.committed())


async def test_a_commit_that_is_never_answered_times_out(wire: Wire) -> None:
    sender = wire.new_sender(fault=drop_commits)
    _, ticket = wire.expect(num_tokens=8)
    transfer = await sender.open(wire.receiver.destination, ticket)
    send_all(transfer, cut(wire.new_data(8)))
    with pytest.raises(TransferTimeout, match=r"0\.05 s"):
        await transfer.commit(1, timeout_s=0.05)
    assert sender.stats.transfers_failed == 1


async def test_a_repeated_commit_is_confirmed_once(wire: Wire) -> None:
    sender = wire.new_sender(fault=lambda request: [request, request] if request.HasField("commit") else [request])
    landing, ticket = wire.expect(num_tokens=8)
    transfer = await sender.open(wire.receiver.destination, ticket)
    send_all(transfer, cut(wire.new_data(8)))
    await transfer.commit(1, TIMEOUT_S)
    assert (await landing.reception.committed()).first_token == 1
    await assert_link_works(wire)
    assert wire.receiver.stats.transfers_committed == 2
    assert sender.stats.transfers_committed == 1


async def test_a_commit_for_an_unknown_transfer_is_answered(wire: Wire) -> None:
    landing, ticket = wire.expect(num_tokens=0)
    landing.reception.close()
    transfer = await wire.sender.open(wire.receiver.destination, ticket)
    with pytest.raises(TransferAborted):
        await transfer.commit(1, TIMEOUT_S)


async def test_a_lost_link_fails_its_transfers_and_the_next_attempt_takes_a_new_one(wire: Wire) -> None:
    landing, ticket = wire.expect(num_tokens=8)
    data = wire.new_data(8)
    first = await wire.sender.open(wire.receiver.destination, ticket)
    send_all(first, cut(data)[:3])
    await until(lambda: len(landing.pieces) == 3, "three pieces")
    await wire.cut()
    with pytest.raises(PeerLost):
        await first.commit(1, TIMEOUT_S)
    second = await wire.sender.open(wire.receiver.destination, replace(ticket, attempt=2))
    send_all(second, cut(data))
    await second.commit(2, TIMEOUT_S)
    assert torch.equal(landing.data, data)


async def test_a_process_restarted_at_the_same_address_is_another_peer(wire: Wire) -> None:
    await assert_link_works(wire)
    old = wire.receiver.destination
    landing, old_ticket = wire.expect(num_tokens=8)
    await wire.replace_receiver()
    assert wire.receiver.destination.offers == old.offers
    with pytest.raises(TransferAborted):
        await landing.reception.committed()
    await assert_link_works(wire)
    with pytest.raises(PeerLost, match="is now incarnation"):
        await wire.sender.open(old, old_ticket)
    await assert_link_works(wire)  # being asked for the old one does no harm to the new one


async def test_nobody_at_the_address_is_a_lost_peer(wire: Wire) -> None:
    _, ticket = wire.expect(num_tokens=8)
    nobody = replace(wire.receiver.destination, offers=(Offer(wire.kind, "127.0.0.1:1"),))
    with pytest.raises(PeerLost):
        await wire.sender.open(nobody, ticket)


@pytest.mark.parametrize(
    ("field", "theirs", "mine"),
    [("dtype", "bfloat16", "float32"), ("head_dim", 16, 8), ("model_fingerprint", "other", "tiny")],
)
async def test_an_incompatible_layout_names_the_field_and_both_values(
    wire: Wire, field: str, theirs: object, mine: object
) -> None:
    sender = wire.new_sender(replace(wire.layout, **{field: theirs}))  # type: ignore[arg-type]
    _, ticket = wire.expect(num_tokens=8)
    with pytest.raises(LayoutMismatch, match=f"{field}.*{mine!r}.*{theirs!r}"):
        await sender.open(wire.receiver.destination, ticket)


async def test_a_source_that_computes_other_checksums_is_refused(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    def restore(request: pb.LinkRequest) -> list[pb.LinkRequest]:
        monkeypatch.undo()  # the hello is made: the destination has xxhash
        return [request]

    monkeypatch.setattr("kv_transfer.handshake.CHECKSUM", Checksum("crc32", zlib.crc32))
    sender = wire.new_sender(fault=restore)
    _, ticket = wire.expect(num_tokens=8)
    with pytest.raises(VersionMismatch, match=r"'xxh3-64', the source 'crc32'.*install"):
        await sender.open(wire.receiver.destination, ticket)


async def test_another_protocol_version_is_named(wire: Wire) -> None:
    def age(request: pb.LinkRequest) -> list[pb.LinkRequest]:
        if request.HasField("hello"):
            request.hello.protocol_version = 0
        return [request]

    _, ticket = wire.expect(num_tokens=8)
    with pytest.raises((VersionMismatch, IncompatiblePeer)):
        await wire.new_sender(fault=age).open(wire.receiver.destination, ticket)


async def test_another_transport_is_named(wire: Wire) -> None:
    _, ticket = wire.expect(num_tokens=8)
    with pytest.raises(IncompatiblePeer, match=f"over .*'{wire.kind}'.*'pigeon'"):
        await wire.sender.open(replace(wire.receiver.destination, offers=(Offer("pigeon", "127.0.0.1:1"),)), ticket)


async def test_concurrent_opens_share_one_link(wire: Wire) -> None:
    hellos: list[pb.LinkRequest] = []

    def count(request: pb.LinkRequest) -> list[pb.LinkRequest]:
        hellos.extend([request] if request.HasField("hello") else [])
        return [request]

    sender = wire.new_sender(fault=count)
    tickets = [wire.expect(num_tokens=8)[1] for _ in range(5)]
    transfers = await asyncio.gather(*(sender.open(wire.receiver.destination, ticket) for ticket in tickets))
    assert len(transfers) == 5
    assert len(hellos) == 1


async def test_a_caller_that_gives_up_on_open_does_not_spoil_it_for_the_others(wire: Wire) -> None:
    tickets = [wire.expect(num_tokens=8)[1] for _ in range(2)]
    impatient, patient = (
        asyncio.create_task(wire.sender.open(wire.receiver.destination, ticket)) for ticket in tickets
    )
    await asyncio.sleep(0)
    impatient.cancel()
    transfer = await patient
    send_all(transfer, cut(wire.new_data(8)))
    await transfer.commit(1, TIMEOUT_S)


async def test_closing_leaves_no_task_thread_or_descriptor_behind(wire: Wire) -> None:
    await assert_link_works(wire)  # whatever gRPC makes once per process exists now
    sender = wire.new_sender()
    before = Held.now()
    landing, ticket = wire.expect(num_tokens=8)
    transfer = await sender.open(wire.receiver.destination, ticket)
    send_all(transfer, cut(wire.new_data(8))[:5])
    await until(lambda: len(landing.pieces) == 5, "five pieces")
    await sender.close()
    await sender.close()
    with pytest.raises(TransferAborted):
        await transfer.commit(1, TIMEOUT_S)
    landing.reception.close()
    await until(lambda: Held.now().is_within(before), f"{before} again")
    with pytest.raises(PeerLost, match="closed"):
        await sender.open(wire.receiver.destination, ticket)


async def test_closing_the_receiver_ends_its_links_and_receptions(wire: Wire) -> None:
    landing, ticket = wire.expect(num_tokens=8)
    transfer = await wire.sender.open(wire.receiver.destination, ticket)
    send_all(transfer, cut(wire.new_data(8))[:5])
    await until(lambda: len(landing.pieces) == 5, "five pieces")
    await wire.receiver.close()
    await wire.receiver.close()
    with pytest.raises((PeerLost, TransferAborted)):
        await transfer.commit(1, TIMEOUT_S)
    with pytest.raises(TransferAborted):
        await landing.reception.committed()
    with pytest.raises(PeerLost, match=r"closed|nobody"):
        await wire.sender.open(wire.receiver.destination, replace(ticket, attempt=2))


def drop_commits(request: pb.LinkRequest) -> list[pb.LinkRequest]:
    is_dropped = request.HasField("commit") and request.commit.ticket.transfer_id != PROBE_ID
    return [] if is_dropped else [request]


async def send_with_fault(
    wire: Wire,
    spoil: Callable[[pb.Piece], None] | None,
    error: type[Exception],
    damage: Callable[[Tensor], Tensor] = lambda payload: payload,
) -> None:
    """Spoil the first piece only; the attempt fails with `error`, and the transfer can still succeed."""
    spoiled = 0

    def fault(request: pb.LinkRequest) -> list[pb.LinkRequest]:
        nonlocal spoiled
        if request.HasField("piece") and request.piece.ticket.transfer_id != PROBE_ID:
            spoiled += 1
            if spoil is not None and spoiled == 1:
                spoil(request.piece)
        return [request]

    sender = wire.new_sender(fault=fault, damage=lambda payload: damage(payload) if spoiled == 1 else payload)
    await fail_once_and_succeed(wire, sender, error)


async def receive_with_fault(wire: Wire, spoil: Callable[[Arrival], Arrival]) -> None:
    """The same at the other end."""
    spoiled = 0

    def spoil_the_first(arrival: Arrival) -> Arrival:
        nonlocal spoiled
        if not arrival.request.HasField("piece") or arrival.request.piece.ticket.transfer_id == PROBE_ID:
            return arrival
        spoiled += 1
        return spoil(arrival) if spoiled == 1 else arrival

    wire.spoil = spoil_the_first
    await fail_once_and_succeed(wire, wire.sender, CorruptPiece)


async def fail_once_and_succeed(wire: Wire, sender: LinkSender, error: type[Exception]) -> None:
    landing, ticket = wire.expect(num_tokens=8)
    data = wire.new_data(8)
    first = await sender.open(wire.receiver.destination, ticket)
    send_all(first, cut(data))
    with pytest.raises(error):
        await first.commit(1, TIMEOUT_S)
    await assert_still_waiting(landing.reception.committed())
    second = await sender.open(wire.receiver.destination, replace(ticket, attempt=2))
    send_all(second, cut(data))
    await second.commit(2, TIMEOUT_S)
    assert torch.equal(landing.data, data)


async def assert_still_waiting(coroutine: object) -> None:
    task = asyncio.ensure_future(coroutine)  # type: ignore[arg-type]
    await asyncio.sleep(0)
    assert not task.done()
    task.cancel()


async def assert_link_works(wire: Wire) -> None:
    landing, ticket = wire.expect(num_tokens=3)
    data = wire.new_data(3)
    transfer = await wire.sender.open(wire.receiver.destination, ticket)
    send_all(transfer, cut(data))
    await transfer.commit(1, TIMEOUT_S)
    assert torch.equal(landing.data, data)
    landing.reception.close()
