"""Back-pressure: a destination that is slow or never releases costs bounded memory and stalls its own link only."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

import pytest
import torch

from common.errors import PeerLost
from common.identity import Ticket, new_incarnation, new_transfer_id
from common.kv_layout import KVLayout
from common.transfer_config import MIB, TransferConfig
from kv_transfer.credit import Backlog, Credit, FreedBytes
from kv_transfer.heads import HeadRange
from kv_transfer.link import Endpoint
from kv_transfer.receiver import LinkReceiver
from kv_transfer.sender import LinkSender
from kv_transfer.transport import KVPiece, OutgoingTransfer, Release
from kv_transfer.wire import MAX_PIECE_BYTES
from tests.kv_transfer.ends import HOST_KINDS, Ends, ends_of
from tests.kv_transfer.wires import TIMEOUT_S, until

LAYOUT = KVLayout("wide", num_layers=1, num_kv_heads=2, head_dim=64, dtype="float32", rope="none")
PIECE_TOKENS = 256
PIECE = KVPiece(0, 0, torch.ones(1, 2, PIECE_TOKENS, 2, 64))
WINDOW = BACKLOG = 2 * MIB
MAX_PIECES = 200


@dataclass
class Keeper:
    """A destination that releases nothing before it is told to."""

    receiver: LinkReceiver
    releases: list[Release] = field(default_factory=list)
    is_generous: bool = False

    def on_piece(self, piece: KVPiece, release: Release) -> None:
        if self.is_generous:
            release()
        else:
            self.releases.append(release)

    def be_generous(self) -> None:
        self.is_generous = True
        while self.releases:
            self.releases.pop()()

    def expect(self, source: str, num_pieces: int) -> Ticket:
        transfer_id, num_tokens = new_transfer_id(), num_pieces * PIECE_TOKENS
        self.receiver.expect(transfer_id, num_tokens, 0, self.on_piece)
        return Ticket(transfer_id, 1, source, self.receiver.destination.incarnation, num_tokens)


@dataclass
class Producer:
    """Sends a piece whenever there is room, as prefill does."""

    transfer: OutgoingTransfer
    num_sent: int = 0

    def produce(self, num_pieces: int) -> None:
        while self.num_sent < num_pieces and self.transfer.has_room:
            self.transfer.send(replace(PIECE, token_start=self.num_sent * PIECE_TOKENS))
            self.num_sent += 1


async def new_keeper(ends: Ends, config: TransferConfig) -> Keeper:
    endpoint = Endpoint(LAYOUT, new_incarnation(), HeadRange(0, 2))
    return Keeper(await ends.receiver(endpoint, config))


def new_sender(ends: Ends, config: TransferConfig) -> tuple[LinkSender, str]:
    source = new_incarnation()
    return ends.sender(Endpoint(LAYOUT, source, HeadRange(0, 2)), config), source


async def produce_until_stalled(producer: Producer, keeper: Keeper) -> None:
    def is_stalled() -> bool:
        producer.produce(MAX_PIECES)
        return len(keeper.releases) * PIECE.num_bytes == WINDOW and not producer.transfer.has_room

    await until(is_stalled, "a full window and a full backlog")


@pytest.mark.parametrize("kind", HOST_KINDS)
async def test_a_commit_waits_for_as_long_as_its_slow_link_moves(kind: str) -> None:
    config = TransferConfig(transport=kind, window_bytes=WINDOW)
    async with ends_of(kind) as ends:
        receiver = (await new_keeper(ends, config)).receiver
        sender, source = new_sender(ends, config)
        loop, num_pieces, num_landed = asyncio.get_running_loop(), 32, 0

        def release_slowly(piece: KVPiece, release: Release) -> None:
            nonlocal num_landed
            num_landed += 1
            loop.call_later(0.03 * num_landed, release)

        transfer_id, num_tokens = new_transfer_id(), num_pieces * PIECE_TOKENS
        receiver.expect(transfer_id, num_tokens, 0, release_slowly)
        ticket = Ticket(transfer_id, 1, source, receiver.destination.incarnation, num_tokens)
        transfer = await sender.open(receiver.destination, ticket)
        for index in range(num_pieces):
            transfer.send(replace(PIECE, token_start=index * PIECE_TOKENS))
        start_s = loop.time()
        await transfer.commit(1, timeout_s=0.4)
        assert loop.time() - start_s > 0.5, "the link was to be slower than the timeout"


@pytest.mark.parametrize("kind", HOST_KINDS)
async def test_a_destination_that_never_releases_stalls_its_own_link_only(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kv_transfer.link_source.MAX_BACKLOG_BYTES", BACKLOG)
    config = TransferConfig(transport=kind, window_bytes=WINDOW, stall_timeout_s=0.5)
    async with ends_of(kind) as ends:
        stuck, well = await new_keeper(ends, config), await new_keeper(ends, config)
        well.is_generous = True
        sender, source = new_sender(ends, config)
        rooms: list[None] = []
        sender.on_room = lambda: rooms.append(None)
        transfer = await sender.open(stuck.receiver.destination, stuck.expect(source, MAX_PIECES))
        producer = Producer(transfer)
        await produce_until_stalled(producer, stuck)
        assert producer.num_sent * PIECE.num_bytes <= WINDOW + BACKLOG + PIECE.num_bytes

        other = await sender.open(well.receiver.destination, well.expect(source, 4))
        assert other.has_room
        Producer(other).produce(4)
        await other.commit(1, TIMEOUT_S)

        rooms.clear()
        with pytest.raises(PeerLost, match=r"made no room for KV within 0\.5 s"):
            await transfer.commit(1, TIMEOUT_S)
        await until(lambda: rooms != [], "a call of on_room: whoever waits for room hears of the link's end")
        assert transfer.has_room, "nobody may wait for a dead link"
        assert len(stuck.releases) * PIECE.num_bytes == WINDOW
        stuck.be_generous()  # late releases harm nobody


@pytest.mark.parametrize("kind", HOST_KINDS)
async def test_room_comes_back_with_the_releases(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_transfer.link_source.MAX_BACKLOG_BYTES", BACKLOG)
    config = TransferConfig(transport=kind, window_bytes=WINDOW, stall_timeout_s=TIMEOUT_S)
    async with ends_of(kind) as ends:
        keeper = await new_keeper(ends, config)
        sender, source = new_sender(ends, config)
        has_room = asyncio.Event()
        sender.on_room = has_room.set
        transfer = await sender.open(keeper.receiver.destination, keeper.expect(source, MAX_PIECES))
        producer = Producer(transfer)
        await produce_until_stalled(producer, keeper)
        has_room.clear()
        keeper.be_generous()
        async with asyncio.timeout(TIMEOUT_S):
            while producer.num_sent < MAX_PIECES:
                await has_room.wait()
                has_room.clear()
                producer.produce(MAX_PIECES)
        receipt = await transfer.commit(1, TIMEOUT_S)
        assert receipt.num_bytes == MAX_PIECES * PIECE.num_bytes


async def test_credit_is_waited_for_and_given_back() -> None:
    credit = Credit(100, stall_timeout_s=TIMEOUT_S)
    await credit.take(60)
    waiting = asyncio.create_task(credit.take(60))
    await asyncio.sleep(0)
    credit.give(10)
    await asyncio.sleep(0)
    assert not waiting.done()
    credit.give(10)
    await waiting


async def test_each_credit_that_comes_renews_the_patience_with_a_destination() -> None:
    credit = Credit(0, stall_timeout_s=0.5)
    waiting = asyncio.create_task(credit.take(4))
    for _ in range(4):
        await asyncio.sleep(0.15)
        credit.give(1)
    await waiting
    with pytest.raises(PeerLost, match="made no room"):
        await credit.take(1)


async def test_a_peer_that_counts_no_credit_is_never_waited_for() -> None:
    credit = Credit(None, stall_timeout_s=0.0)
    credit.give(5)
    await credit.take(1 << 40)


def test_a_full_backlog_asks_for_a_pause_until_half_of_it_is_gone() -> None:
    calls: list[None] = []
    backlog = Backlog(100, lambda: calls.append(None))
    backlog.add(99)
    assert backlog.has_room
    backlog.add(1)
    assert not backlog.has_room
    backlog.remove(50)
    assert not backlog.has_room, "half is still there"
    assert calls == []
    backlog.remove(1)
    assert backlog.has_room
    assert len(calls) == 1
    backlog.remove(49)
    assert len(calls) == 1, "nobody was waiting"


async def test_a_wide_window_is_given_back_by_quarters_and_a_narrow_one_also_when_it_is_empty() -> None:
    narrow, wide = FreedBytes(MAX_PIECE_BYTES), FreedBytes(8 * MAX_PIECE_BYTES)
    for freed in (narrow, wide):
        freed.add(64)
    assert await narrow.next_credit(lambda: 0) == 64
    waiting = asyncio.create_task(wide.next_credit(lambda: 0))
    await asyncio.sleep(0)
    assert not waiting.done()
    wide.add(2 * MAX_PIECE_BYTES)
    assert await waiting == 2 * MAX_PIECE_BYTES + 64
