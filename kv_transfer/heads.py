"""Which KV heads go from which source rank to which destination rank when the two sides split them differently.

    8 heads        0   1   2   3   4   5   6   7
    3 sources     [0 .. 1] [2  ..  4] [5  ..  7]          four messages: 0→0 [0, 2), 1→0 [2, 4),
    2 destinations [0    ..    3] [4    ..    7]                         1→1 [4, 5), 2→1 [5, 8)

With more ranks than heads several ranks hold the same head. Every destination that holds it is sent it; of the sources
that hold it one sends, and consecutive destinations are shared out evenly among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from common.errors import LayoutMismatch


@dataclass(frozen=True, order=True)
class HeadRange:
    """KV heads [start, end) of the whole model."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise LayoutMismatch(f"[{self.start}, {self.end}) is not a range of KV heads")

    def __len__(self) -> int:
        return self.end - self.start

    def overlap(self, other: HeadRange) -> HeadRange | None:
        start, end = max(self.start, other.start), min(self.end, other.end)
        return HeadRange(start, end) if start < end else None

    def within(self, shard: HeadRange) -> slice:
        """Where these heads lie on the head axis of a tensor that holds exactly the heads of `shard`."""
        assert self.overlap(shard) == self, f"{self} is not within {shard}"
        return slice(self.start - shard.start, self.end - shard.start)


@dataclass(frozen=True)
class HeadMove:
    """One message: `source` and `destination` are tensor-parallel ranks, both of which hold `heads`."""

    source: int
    destination: int
    heads: HeadRange


@dataclass(frozen=True)
class HeadPlan:
    """All moves between two groups of ranks, by source shard, then by destination. Both sides compute the same."""

    moves: tuple[HeadMove, ...]

    def sent_by(self, source: int) -> list[HeadMove]:
        return [move for move in self.moves if move.source == source]

    def awaited_by(self, destination: int) -> list[HeadMove]:
        """Their heads tile the destination's shard in order."""
        return [move for move in self.moves if move.destination == destination]


def even_shards(num_kv_heads: int, num_ranks: int) -> tuple[HeadRange, ...]:
    """The heads of each rank: as even as they divide, or one each and some of them repeated."""
    assert num_kv_heads > 0
    edges = [num_kv_heads * rank // num_ranks for rank in range(num_ranks + 1)]
    return tuple(HeadRange(start, max(start + 1, end)) for start, end in pairwise(edges))


def plan_heads(sources: Sequence[HeadRange], destinations: Sequence[HeadRange]) -> HeadPlan:
    """Bring every destination rank the heads of its shard exactly once, in as few messages as its shard allows.

    Raises: LayoutMismatch when source shards overlap without being equal, or lack a head that a destination holds.
    """
    holders = _holders(sources)
    moves: list[HeadMove] = []
    for shard, ranks in holders.items():
        takers = [(rank, heads) for rank, held in enumerate(destinations) if (heads := held.overlap(shard))]
        for index, (destination, heads) in enumerate(takers):
            source = ranks[index * len(ranks) // len(takers)]  # with equal degrees every rank sends to its equal
            moves.append(HeadMove(source, destination, heads))
    plan = HeadPlan(tuple(moves))
    _require_covered(plan, destinations)
    return plan


def take_heads(data: Tensor, shard: HeadRange, heads: HeadRange) -> Tensor:
    """Some heads of a source rank's piece [layers, 2 (K, V), tokens, len(shard), head_dim], contiguous.

    A copy unless they are all of them: then it is `data` itself.
    """
    assert data.shape[3] == len(shard)
    return data[:, :, :, heads.within(shard)].contiguous()


def put_heads(piece: Tensor, data: Tensor, shard: HeadRange, heads: HeadRange) -> None:
    """Copy what take_heads gave into its place in a destination rank's piece, whose head axis holds `shard`."""
    assert piece.shape[3] == len(shard)
    piece[:, :, :, heads.within(shard)].copy_(data)


def _holders(sources: Sequence[HeadRange]) -> dict[HeadRange, list[int]]:
    """The distinct source shards from head 0 up, and the ranks that hold each."""
    holders: dict[HeadRange, list[int]] = {}
    for shard in sorted(sources):
        holders.setdefault(shard, [])
    for rank, shard in enumerate(sources):
        holders[shard].append(rank)
    for left, right in pairwise(holders):
        if left.overlap(right):
            raise LayoutMismatch(f"source shards {left} and {right} share heads without being equal")
    return holders


def _require_covered(plan: HeadPlan, destinations: Sequence[HeadRange]) -> None:
    for rank, shard in enumerate(destinations):
        if sum(len(move.heads) for move in plan.awaited_by(rank)) != len(shard):  # they never overlap: equal is all
            raise LayoutMismatch(f"no source rank holds all heads of destination rank {rank}: {shard}")
