"""The plan between tensor-parallel degrees: each rank gets each of its heads once, in the fewest messages."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.errors import LayoutMismatch
from kv_transfer.heads import HeadMove, HeadPlan, HeadRange, even_shards, plan_heads, put_heads, take_heads

degrees = st.integers(1, 16)
head_counts = st.integers(1, 40)
Shards = tuple[HeadRange, ...]


@st.composite
def tilings(draw: st.DrawFn, num_heads: int) -> Shards:
    """Shards of any sizes that tile the heads, each held by one to three ranks, the ranks in any order."""
    cuts = draw(st.sets(st.integers(1, num_heads), max_size=6)) | {0, num_heads}
    shards = [HeadRange(start, end) for start, end in pairwise(sorted(cuts))]
    return tuple(draw(st.permutations([shard for shard in shards for _ in range(draw(st.integers(1, 3)))])))


@st.composite
def sides(draw: st.DrawFn) -> tuple[Shards, Shards]:
    """Source and destination shards of the same heads; even ones, or any."""
    num_heads = draw(head_counts)
    if draw(st.booleans()):
        return even_shards(num_heads, draw(degrees)), even_shards(num_heads, draw(degrees))
    return draw(tilings(num_heads)), draw(tilings(num_heads))


@given(head_counts, degrees)
def test_even_shards_hold_every_head_and_differ_by_one_at_most(num_heads: int, num_ranks: int) -> None:
    shards = even_shards(num_heads, num_ranks)
    holders = Counter(head for shard in shards for head in range(shard.start, shard.end))
    assert len(shards) == num_ranks
    assert set(holders) == set(range(num_heads))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    assert max(holders.values()) - min(holders.values()) <= 1
    assert max(holders.values()) == 1 or num_ranks > num_heads


@given(sides())
def test_every_destination_gets_each_of_its_heads_once_from_a_rank_that_holds_it(both: tuple[Shards, Shards]) -> None:
    sources, destinations = both
    plan = plan_heads(sources, destinations)
    for rank, shard in enumerate(destinations):
        arriving = [head for move in plan.awaited_by(rank) for head in range(move.heads.start, move.heads.end)]
        assert arriving == list(range(shard.start, shard.end))
    for move in plan.moves:
        assert sources[move.source].overlap(move.heads) == move.heads


@given(sides())
def test_what_the_sources_send_is_what_the_destinations_await(both: tuple[Shards, Shards]) -> None:
    sources, destinations = both
    plan = plan_heads(sources, destinations)
    sent = [move for source in range(len(sources)) for move in plan.sent_by(source)]
    awaited = [move for destination in range(len(destinations)) for move in plan.awaited_by(destination)]
    assert Counter(sent) == Counter(awaited) == Counter(plan.moves)


@given(sides())
def test_no_plan_needs_fewer_messages(both: tuple[Shards, Shards]) -> None:
    sources, destinations = both
    fewest = sum(1 for held in destinations for shard in set(sources) if held.overlap(shard))
    assert len(plan_heads(sources, destinations).moves) == fewest


@given(sides())
def test_ranks_that_hold_the_same_heads_share_the_messages(both: tuple[Shards, Shards]) -> None:
    sources, destinations = both
    plan = plan_heads(sources, destinations)
    for shard in set(sources):
        counts = [len(plan.sent_by(rank)) for rank, held in enumerate(sources) if held == shard]
        assert max(counts) - min(counts) <= 1


@given(head_counts, degrees)
def test_equal_degrees_send_one_message_from_each_rank_to_its_equal(num_heads: int, num_ranks: int) -> None:
    shards = even_shards(num_heads, num_ranks)
    assert plan_heads(shards, shards).moves == tuple(HeadMove(rank, rank, held) for rank, held in enumerate(shards))


def test_the_plan_that_is_drawn_in_the_module() -> None:
    assert plan_heads(even_shards(8, 3), even_shards(8, 2)) == HeadPlan(
        (
            HeadMove(0, 0, HeadRange(0, 2)),
            HeadMove(1, 0, HeadRange(2, 4)),
            HeadMove(1, 1, HeadRange(4, 5)),
            HeadMove(2, 1, HeadRange(5, 8)),
        )
    )


def test_two_heads_on_eight_ranks_reach_four_from_four_senders() -> None:
    plan = plan_heads(even_shards(2, 8), even_shards(2, 4))
    assert [(move.source, move.destination) for move in plan.moves] == [(0, 0), (2, 1), (4, 2), (6, 3)]


@pytest.mark.parametrize(
    ("sources", "destinations"),
    [
        ([HeadRange(0, 2), HeadRange(1, 4)], [HeadRange(0, 4)]),
        ([HeadRange(0, 2), HeadRange(0, 4)], [HeadRange(0, 4)]),
        ([HeadRange(0, 2), HeadRange(1, 3), HeadRange(4, 5)], [HeadRange(0, 5)]),
        ([HeadRange(0, 2), HeadRange(3, 4)], [HeadRange(0, 4)]),
        ([HeadRange(0, 4)], [HeadRange(0, 2), HeadRange(2, 5)]),
        ([], [HeadRange(0, 1)]),
    ],
)
def test_shards_that_do_not_fit_are_refused(sources: list[HeadRange], destinations: list[HeadRange]) -> None:
    with pytest.raises(LayoutMismatch):
        plan_heads(sources, destinations)


@pytest.mark.parametrize(("start", "end"), [(-1, 2), (2, 2), (3, 1)])
def test_an_empty_or_negative_range_is_refused(start: int, end: int) -> None:
    with pytest.raises(LayoutMismatch):
        HeadRange(start, end)


@given(sides())
def test_pieces_taken_apart_and_put_together_are_the_destinations_own(both: tuple[Shards, Shards]) -> None:
    sources, destinations = both
    num_heads = max(shard.end for shard in sources)
    whole = torch.randn(2, 2, 3, num_heads, 4)
    for rank, shard in enumerate(destinations):
        landed = torch.full((2, 2, 3, len(shard), 4), torch.nan)
        for move in plan_heads(sources, destinations).awaited_by(rank):
            held = sources[move.source]
            part = take_heads(whole[:, :, :, held.start : held.end].contiguous(), held, move.heads)
            assert part.is_contiguous()
            assert part.shape == (2, 2, 3, len(move.heads), 4)
            put_heads(landed, part, shard, move.heads)
        assert torch.equal(landed, whole[:, :, :, shard.start : shard.end])


def test_all_heads_of_a_shard_are_taken_without_a_copy() -> None:
    shard, data = HeadRange(4, 8), torch.randn(1, 2, 3, 4, 5)
    assert take_heads(data, shard, shard).data_ptr() == data.data_ptr()
