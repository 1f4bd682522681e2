"""Which of a transfer's layers × tokens × heads are in. Pieces are boxes; they may come in any order and never overlap.

    heads     bands, split where a piece begins or ends; one band as long as every piece holds all heads
    layers    each layer of each band has a lane of its own
    tokens    a lane is the sorted edges of the token ranges that are in:  0   8       20  24   = [0, 8) and [20, 24)

Ranges that touch grow together, so pieces in order leave a lane with two edges, however many they are.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    """Layers [layer_start, layer_end) × tokens [token_start, token_end) × KV heads [head_start, head_end)."""

    layer_start: int
    layer_end: int
    token_start: int
    token_end: int
    head_start: int
    head_end: int

    @property
    def volume(self) -> int:
        """In layers × tokens × heads."""
        layers, tokens = self.layer_end - self.layer_start, self.token_end - self.token_start
        return layers * tokens * (self.head_end - self.head_start)

    def holds(self, other: Box) -> bool:
        """Whether `other` has a volume and lies within."""
        return (
            self.layer_start <= other.layer_start < other.layer_end <= self.layer_end
            and self.token_start <= other.token_start < other.token_end <= self.token_end
            and self.head_start <= other.head_start < other.head_end <= self.head_end
        )


Lane = list[int]


class Coverage:
    """What of `bounds` is in. The price of a box is its layers × its bands, each with a bisection of one lane."""

    def __init__(self, bounds: Box) -> None:
        self.bounds = bounds
        self.covered = 0  # in layers × tokens × heads
        self._band_edges = [bounds.head_start, bounds.head_end]
        self._bands: list[list[Lane]] = [[[] for _ in range(bounds.layer_start, bounds.layer_end)]]

    @property
    def is_complete(self) -> bool:
        return self.covered == self.bounds.volume  # boxes are within bounds and never overlap

    def claim(self, box: Box) -> bool:
        """Take in a box that `bounds` holds. False, and nothing changes, if part of it is in already."""
        assert self.bounds.holds(box), f"{box} is not within {self.bounds}"
        lanes = list(self._lanes(box))
        if not all(_is_free(lane, box.token_start, box.token_end) for lane in lanes):
            return False
        for lane in lanes:
            _toggle(lane, box.token_start)
            _toggle(lane, box.token_end)
        self.covered += box.volume
        return True

    def _lanes(self, box: Box) -> Iterator[Lane]:
        first = self._band_from(box.head_start)
        last = self._band_from(box.head_end)
        layers = slice(box.layer_start - self.bounds.layer_start, box.layer_end - self.bounds.layer_start)
        for band in self._bands[first:last]:
            yield from band[layers]

    def _band_from(self, head: int) -> int:
        """The index of the band that begins at this head, after a split if none does."""
        index = bisect_left(self._band_edges, head)
        if self._band_edges[index] != head:
            self._band_edges.insert(index, head)
            self._bands.insert(index, [list(lane) for lane in self._bands[index - 1]])
        return index


def _is_free(lane: Lane, start: int, end: int) -> bool:
    """Whether nothing of [start, end) is in: no edge inside it, and an even number up to its start (odd ones open)."""
    index = bisect_right(lane, start)
    return index % 2 == 0 and index == bisect_left(lane, end)


def _toggle(lane: Lane, edge: int) -> None:
    """Add an edge; one that is there already, where two ranges touch, vanishes instead."""
    index = bisect_left(lane, edge)
    if index < len(lane) and lane[index] == edge:
        del lane[index]
    else:
        lane.insert(index, edge)
