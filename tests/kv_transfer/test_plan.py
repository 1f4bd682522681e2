"""The plan: every chunk is tiled exactly, by pieces of useful size, as early as its layers allow."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.kv_layout import KVLayout
from kv_transfer.plan import MAX_AIM_BYTES, MIN_PIECE_BYTES, LayerGroups, PieceRange, suitable_piece_bytes
from kv_transfer.transport import LinkSpeed

layouts = st.builds(
    KVLayout,
    model_fingerprint=st.just("any"),
    num_layers=st.integers(1, 40),
    num_kv_heads=st.integers(1, 16),
    head_dim=st.sampled_from([8, 64, 128, 1024]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    rope=st.just("any"),
)
groups = st.builds(LayerGroups, layouts, num_tokens=st.integers(0, 3000), piece_bytes=st.integers(1, 2**24))


def num_bytes(plan: LayerGroups, piece: PieceRange) -> int:
    area = (piece.layer_end - piece.layer_start) * (piece.token_end - piece.token_start)
    return area * plan.layout.token_layer_bytes


def by_layer(plan: LayerGroups) -> list[list[PieceRange]]:
    return [plan.ready_after(layer) for layer in range(plan.layout.num_layers)]


@pytest.mark.parametrize(
    ("gb_per_s", "round_trip_ms", "piece_kib"),
    [
        (0.01, 0.3, 256),  # a slow link
        (0.1, 0.5, 256),
        (0.9, 0.6, 1054),  # gRPC between two processes
        (1.9, 0.31, 1150),  # tcp
        (3.0, 0.27, 1582),  # shm
        (12.0, 0.3, 2048),  # a fast network: bounded by what holds an event loop
        (1.0, 40.0, 2048),  # a far one
    ],
)
def test_pieces_suit_the_link(gb_per_s: float, round_trip_ms: float, piece_kib: int) -> None:
    speed = LinkSpeed(gb_per_s * 1e9, round_trip_ms / 1e3)
    assert suitable_piece_bytes(speed) // 1024 == piece_kib


def test_pieces_are_of_the_smallest_size_where_nobody_measured() -> None:
    assert suitable_piece_bytes(None) == MIN_PIECE_BYTES


@given(groups)
def test_the_pieces_of_a_chunk_tile_it_and_leave_with_their_last_layer(plan: LayerGroups) -> None:
    next_layer = 0
    for layer, pieces in enumerate(by_layer(plan)):
        if not pieces:
            continue
        assert {(piece.layer_start, piece.layer_end) for piece in pieces} == {(next_layer, layer + 1)}
        assert pieces[0].token_start == 0
        assert pieces[-1].token_end == plan.num_tokens
        assert all(left.token_end == right.token_start for left, right in pairwise(pieces))
        assert all(piece.token_start < piece.token_end for piece in pieces)
        next_layer = layer + 1
    assert next_layer == (plan.layout.num_layers if plan.num_tokens else 0)


@given(groups)
def test_a_piece_reaches_the_aim_unless_the_layers_run_out(plan: LayerGroups) -> None:
    aim = min(plan.piece_bytes, MAX_AIM_BYTES)
    for pieces in by_layer(plan):
        if pieces and pieces[0].layer_end < plan.layout.num_layers:
            assert sum(num_bytes(plan, piece) for piece in pieces) >= aim
            assert len(pieces) == 1 or min(num_bytes(plan, piece) for piece in pieces) >= aim // 2


@given(groups)
def test_no_piece_exceeds_the_bound_and_no_group_waits_longer_than_it_must(plan: LayerGroups) -> None:
    for pieces in by_layer(plan):
        for piece in pieces:
            is_one_cell = piece.token_end - piece.token_start == piece.layer_end - piece.layer_start == 1
            assert num_bytes(plan, piece) <= 2 * min(plan.piece_bytes, MAX_AIM_BYTES) or is_one_cell
            layers = piece.layer_end - piece.layer_start
            one_less = (layers - 1) * plan.num_tokens * plan.layout.token_layer_bytes
            assert layers == 1 or one_less < plan.piece_bytes


def test_a_long_chunk_goes_layer_by_layer_and_a_short_one_in_groups() -> None:
    layout = KVLayout("llama", num_layers=7, num_kv_heads=8, head_dim=128, dtype="bfloat16", rope="any")
    long = LayerGroups(layout, num_tokens=1024, piece_bytes=MAX_AIM_BYTES)
    short = LayerGroups(layout, num_tokens=22, piece_bytes=256 * 1024)
    assert by_layer(long) == [[PieceRange(layer, layer + 1, 0, 1024)] for layer in range(7)]
    smaller = LayerGroups(layout, num_tokens=1024, piece_bytes=1024 * 1024)
    assert by_layer(smaller) == [
        [PieceRange(layer, layer + 1, 0, 512), PieceRange(layer, layer + 1, 512, 1024)] for layer in range(7)
    ]
    assert by_layer(short) == [
        [],
        [],
        [PieceRange(0, 3, 0, 22)],
        [],
        [],
        [PieceRange(3, 6, 0, 22)],
        [PieceRange(6, 7, 0, 22)],
    ]
