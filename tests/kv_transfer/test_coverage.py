"""Coverage of layers × tokens × heads, against a grid of booleans: it says the same after any boxes in any order."""

from __future__ import annotations

from dataclasses import astuple, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kv_transfer.coverage import Box, Coverage

BOUNDS = Box(1, 5, 3, 15, 2, 8)


class Grid:
    """The oracle: one boolean per layer, token and head."""

    def __init__(self) -> None:
        self.cells: NDArray[np.bool_] = np.zeros((BOUNDS.layer_end, BOUNDS.token_end, BOUNDS.head_end), dtype=bool)

    def claim(self, box: Box) -> bool:
        layers, tokens, heads = ((box.layer_start, box.layer_end), (box.token_start, box.token_end), _heads(box))
        part = self.cells[slice(*layers), slice(*tokens), slice(*heads)]
        is_free = not part.any()
        part |= is_free
        return is_free


def _heads(box: Box) -> tuple[int, int]:
    return box.head_start, box.head_end


@st.composite
def boxes(draw: st.DrawFn, within: Box = BOUNDS) -> Box:
    edges: list[int] = []
    for low, high in zip(astuple(within)[::2], astuple(within)[1::2], strict=True):
        start = draw(st.integers(low, high - 1))
        edges += [start, draw(st.integers(start + 1, high))]
    return Box(*edges)


def halves(box: Box, axis: int, middle: int) -> list[Box]:
    edges = list(astuple(box))
    start, end = edges[2 * axis : 2 * axis + 2]
    parts = [[start, middle], [middle, end]]
    return [Box(*edges[: 2 * axis], *part, *edges[2 * axis + 2 :]) for part in parts if part[0] < part[1]]


@st.composite
def tilings(draw: st.DrawFn) -> list[Box]:
    """Any cut of the bounds into boxes, in any order."""
    parts = [BOUNDS]
    for _ in range(draw(st.integers(0, 16))):
        box = parts.pop(draw(st.integers(0, len(parts) - 1)))
        axis = draw(st.integers(0, 2))
        start, end = astuple(box)[2 * axis : 2 * axis + 2]
        parts += halves(box, axis, draw(st.integers(start, end)))
    return draw(st.permutations(parts))


@given(st.lists(boxes(), max_size=40))
def test_a_box_is_taken_in_exactly_when_the_grid_has_room_for_it(claims: list[Box]) -> None:
    coverage, grid = Coverage(BOUNDS), Grid()
    for box in claims:
        assert coverage.claim(box) == grid.claim(box)
        assert coverage.covered == grid.cells.sum()
        assert coverage.is_complete == (grid.cells.sum() == BOUNDS.volume)


@given(tilings())
def test_any_cut_in_any_order_completes_with_its_last_box(parts: list[Box]) -> None:
    coverage = Coverage(BOUNDS)
    for box in parts:
        assert not coverage.is_complete
        assert coverage.claim(box)
    assert coverage.is_complete


@given(tilings(), boxes())
def test_nothing_fits_once_everything_is_in(parts: list[Box], more: Box) -> None:
    coverage = Coverage(BOUNDS)
    for box in parts:
        coverage.claim(box)
    assert not coverage.claim(more)
    assert coverage.covered == BOUNDS.volume


@given(tilings(), st.data())
def test_a_refused_box_leaves_no_trace(parts: list[Box], data: st.DataObject) -> None:
    coverage = Coverage(BOUNDS)
    for index, box in enumerate(parts):
        if index:
            taken = data.draw(st.sampled_from(parts[:index]))
            overlapping = data.draw(boxes(within=taken))
            assert not coverage.claim(replace(overlapping, token_start=BOUNDS.token_start, token_end=BOUNDS.token_end))
        assert coverage.claim(box)
    assert coverage.is_complete


@given(st.builds(Box, *[st.integers(0, 16)] * 6))
def test_bounds_hold_what_has_a_volume_and_no_cell_outside(box: Box) -> None:
    axes = [(box.layer_start, box.layer_end), (box.token_start, box.token_end), _heads(box)]
    cells = [set(range(*axis)) for axis in axes]
    inside = [set(range(1, 5)), set(range(3, 15)), set(range(2, 8))]
    is_held = all(cell and cell <= room for cell, room in zip(cells, inside, strict=True))
    assert BOUNDS.holds(box) == is_held


def test_bounds_without_tokens_are_complete_at_once() -> None:
    assert Coverage(Box(0, 4, 7, 7, 0, 2)).is_complete


def test_a_box_outside_of_the_bounds_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError):
        Coverage(BOUNDS).claim(replace(BOUNDS, head_end=9))
