"""Unlike tensor-parallel degrees over real links: heads are split or gathered on the way, and a shard fails alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import torch

from common.errors import PeerLost, TransferAborted, TransferError
from common.identity import Ticket, new_incarnation, new_transfer_id
from common.kv_layout import KVLayout
from kv_transfer.heads import HeadPlan, HeadRange, even_shards, plan_heads
from kv_transfer.link import Endpoint
from kv_transfer.receiver import LinkReceiver
from kv_transfer.sender import LinkSender
from kv_transfer.transport import Destination, KVPiece, OutgoingTransfer, Reception, Release
from tests.kv_transfer.ends import HOST_KINDS, Ends, ends_of
from tests.kv_transfer.wires import TIMEOUT_S, until

LAYOUT = KVLayout("sharded", num_layers=3, num_kv_heads=6, head_dim=4, dtype="float32", rope="none")
NUM_TOKENS = 5
SHAPE = (LAYOUT.num_layers, 2, NUM_TOKENS, LAYOUT.num_kv_heads, LAYOUT.head_dim)
TRUTH = torch.randn(SHAPE, generator=torch.Generator().manual_seed(8))
OLD = torch.randn(SHAPE, generator=torch.Generator().manual_seed(9))  # what a failed attempt sent
PER_SHARD = LAYOUT.num_layers  # pieces


@dataclass
class DestinationRank:
    receiver: LinkReceiver
    heads: HeadRange
    data: torch.Tensor = field(init=False)  # [layers, 2, tokens, own heads, head_dim]
    reception: Reception = field(init=False)
    num_pieces: int = 0

    def expect(self, transfer_id: bytes) -> None:
        self.data = torch.zeros(*SHAPE[:3], len(self.heads), LAYOUT.head_dim)
        self.reception = self.receiver.expect(transfer_id, NUM_TOKENS, 0, self._on_piece)

    def _on_piece(self, piece: KVPiece, release: Release) -> None:
        self.num_pieces += 1
        heads = slice(piece.head_start, piece.head_start + piece.data.shape[3])
        self.data[piece.layer_start : piece.layer_start + piece.num_layers, :, :, heads] = piece.data
        release()


@dataclass
class SourceRank:
    sender: LinkSender
    incarnation: str
    heads: HeadRange

    async def open(self, destination: Destination, transfer_id: bytes, attempt: int) -> OutgoingTransfer:
        ticket = Ticket(transfer_id, attempt, self.incarnation, destination.incarnation, NUM_TOKENS)
        return await self.sender.open(destination, ticket)

    def send(self, transfer: OutgoingTransfer, data: torch.Tensor, num_layers: int = LAYOUT.num_layers) -> None:
        own = data[:, :, :, self.heads.start : self.heads.end]
        for layer in range(num_layers):
            transfer.send(KVPiece(layer, 0, own[layer : layer + 1].contiguous()))


@dataclass
class Groups:
    ends: Ends
    sources: list[SourceRank]
    destinations: list[DestinationRank]
    plan: HeadPlan
    transfer_id: bytes

    async def open(self, attempt: int) -> list[tuple[SourceRank, OutgoingTransfer]]:
        """One transfer for each move of the plan."""
        opened: list[tuple[SourceRank, OutgoingTransfer]] = []
        for move in self.plan.moves:
            source, destination = self.sources[move.source], self.destinations[move.destination].receiver.destination
            opened.append((source, await source.open(destination, self.transfer_id, attempt)))
        return opened

    async def assert_attempt_succeeds(self, attempt: int) -> None:
        opened = await self.open(attempt)
        for source, transfer in opened:
            source.send(transfer, TRUTH)
        await asyncio.gather(*(transfer.commit(7, TIMEOUT_S) for _, transfer in opened))
        for destination in self.destinations:
            async with asyncio.timeout(TIMEOUT_S):
                committed = await destination.reception.committed()
            assert (committed.ticket.attempt, committed.first_token) == (attempt, 7)
            assert torch.equal(destination.data, TRUTH[:, :, :, destination.heads.start : destination.heads.end])
            assert committed.receipt.num_bytes == destination.data.numel() * 4

    async def assert_nobody_committed(self) -> None:
        for destination in self.destinations:
            waiting = asyncio.ensure_future(destination.reception.committed())
            await asyncio.sleep(0)
            assert not waiting.done()
            waiting.cancel()


@asynccontextmanager
async def groups_of(kind: str, num_sources: int, num_destinations: int) -> AsyncIterator[Groups]:
    held = even_shards(LAYOUT.num_kv_heads, num_sources)
    wanted = even_shards(LAYOUT.num_kv_heads, num_destinations)
    transfer_id = new_transfer_id()
    async with ends_of(kind) as ends:
        sources = [new_source(ends, heads) for heads in held]
        destinations: list[DestinationRank] = []
        for heads in wanted:
            receiver = await ends.receiver(Endpoint(LAYOUT, new_incarnation(), heads))
            destinations.append(DestinationRank(receiver, heads))
            destinations[-1].expect(transfer_id)
        yield Groups(ends, sources, destinations, plan_heads(held, wanted), transfer_id)


def new_source(ends: Ends, heads: HeadRange) -> SourceRank:
    incarnation = new_incarnation()
    return SourceRank(ends.sender(Endpoint(LAYOUT, incarnation, heads)), incarnation, heads)


@pytest.mark.parametrize("kind", HOST_KINDS)
@pytest.mark.parametrize(("num_sources", "num_destinations"), [(2, 1), (1, 2), (3, 2), (2, 3), (3, 3), (1, 1)])
async def test_every_destination_rank_gets_exactly_its_heads(
    kind: str, num_sources: int, num_destinations: int
) -> None:
    async with groups_of(kind, num_sources, num_destinations) as groups:
        await groups.assert_attempt_succeeds(attempt=1)
        for rank, destination in enumerate(groups.destinations):
            assert destination.num_pieces == PER_SHARD * len(groups.plan.awaited_by(rank))


@pytest.mark.parametrize("kind", HOST_KINDS)
async def test_nothing_is_committed_before_the_last_shard_is(kind: str) -> None:
    async with groups_of(kind, 2, 1) as groups:
        (early, first), (late, second) = await groups.open(attempt=1)
        early.send(first, TRUTH)
        await first.commit(7, TIMEOUT_S)
        late.send(second, TRUTH, num_layers=2)
        await until(lambda: groups.destinations[0].num_pieces == PER_SHARD + 2, "all but one piece")
        await groups.assert_nobody_committed()
        second.send(KVPiece(2, 0, TRUTH[2:, :, :, late.heads.start : late.heads.end].contiguous()))
        await second.commit(7, TIMEOUT_S)
        await groups.destinations[0].reception.committed()
        assert torch.equal(groups.destinations[0].data, TRUTH)


@pytest.mark.parametrize("kind", HOST_KINDS)
async def test_a_shard_whose_source_is_lost_voids_the_attempt_of_all_and_the_next_one_succeeds(kind: str) -> None:
    async with groups_of(kind, 2, 1) as groups:
        (kept, first), (lost, second) = await groups.open(attempt=1)
        lost.send(second, OLD, num_layers=1)
        await until(lambda: groups.destinations[0].num_pieces == 1, "a piece of the shard that will be lost")
        await lost.sender.close()
        with pytest.raises((PeerLost, TransferAborted)):
            await second.commit(7, TIMEOUT_S)
        await until(lambda: len(groups.destinations[0].receiver.links()) == 1, "the loss noticed")
        kept.send(first, OLD)
        with pytest.raises(TransferAborted):
            await first.commit(7, TIMEOUT_S)
        await groups.assert_nobody_committed()
        groups.sources[1] = new_source(groups.ends, lost.heads)  # its process came back
        await groups.assert_attempt_succeeds(attempt=2)


@pytest.mark.parametrize("kind", HOST_KINDS)
async def test_a_shard_that_committed_before_another_was_aborted_is_sent_again(kind: str) -> None:
    async with groups_of(kind, 3, 2) as groups:
        opened = await groups.open(attempt=1)
        *whole, (_, aborted) = opened
        for source, transfer in whole:
            source.send(transfer, OLD)
        await asyncio.gather(*(transfer.commit(3, TIMEOUT_S) for _, transfer in whole))
        aborted.abort()
        with pytest.raises(TransferAborted):
            await aborted.commit(3, TIMEOUT_S)
        assert groups.plan.moves[-1].destination == 1
        waiting = asyncio.ensure_future(groups.destinations[1].reception.committed())
        await asyncio.sleep(0)
        assert not waiting.done()
        waiting.cancel()

        # Rank 0 has everything of the first attempt; what the router retries is a transfer of its own for both.
        groups.transfer_id = new_transfer_id()
        for destination in groups.destinations:
            destination.reception.close()
            destination.expect(groups.transfer_id)
        await groups.assert_attempt_succeeds(attempt=1)


@pytest.mark.parametrize("kind", HOST_KINDS)
async def test_a_retry_over_the_same_links_replaces_every_shard(kind: str) -> None:
    async with groups_of(kind, 2, 1) as groups:
        opened = await groups.open(attempt=1)
        for source, transfer in opened:
            source.send(transfer, OLD, num_layers=2)
        await until(lambda: groups.destinations[0].num_pieces == 4, "most of the first attempt")
        for _, transfer in opened:
            transfer.abort()
        await groups.assert_attempt_succeeds(attempt=2)


@pytest.mark.parametrize("kind", HOST_KINDS)
async def test_a_late_shard_of_an_older_attempt_is_refused_while_the_newer_one_goes_on(kind: str) -> None:
    async with groups_of(kind, 2, 1) as groups:
        old = await groups.open(attempt=1)
        new = await groups.open(attempt=2)
        new[0][0].send(new[0][1], TRUTH)
        await until(lambda: groups.destinations[0].num_pieces == PER_SHARD, "the newer attempt's first shard")
        old[1][0].send(old[1][1], OLD)
        with pytest.raises(TransferError):
            await old[1][1].commit(3, TIMEOUT_S)
        new[1][0].send(new[1][1], TRUTH)
        await asyncio.gather(*(transfer.commit(7, TIMEOUT_S) for _, transfer in new))
        committed = await groups.destinations[0].reception.committed()
        assert committed.ticket.attempt == 2
        assert torch.equal(groups.destinations[0].data, TRUTH)


@pytest.mark.parametrize("kind", ["loopback", "tcp"])
async def test_two_sources_that_both_bring_the_same_heads_are_not_mixed(kind: str) -> None:
    """A prefill worker that was given up but lives on must not spoil the attempt of the one that replaced it."""
    async with groups_of(kind, 2, 1) as groups:
        double = new_source(groups.ends, groups.sources[0].heads)
        destination = groups.destinations[0]
        opened = await groups.open(attempt=1)
        opened[0][0].send(opened[0][1], TRUTH, num_layers=1)
        await until(lambda: destination.num_pieces == 1, "a piece of the right source")
        intruder = await double.open(destination.receiver.destination, groups.transfer_id, 1)
        double.send(intruder, OLD)
        with pytest.raises(TransferAborted):
            await intruder.commit(3, TIMEOUT_S)
        own = TRUTH[1:, :, :, opened[0][0].heads.start : opened[0][0].heads.end].contiguous()
        opened[0][1].send(KVPiece(1, 0, own))
        await opened[0][1].commit(7, TIMEOUT_S)
        opened[1][0].send(opened[1][1], TRUTH)
        await opened[1][1].commit(7, TIMEOUT_S)
        assert torch.equal(destination.data, TRUTH)
