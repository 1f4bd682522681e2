"""The wire format and the assembly: any exact tiling is accepted, anything else is refused."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.identity import Ticket
from common.kv_layout import KVLayout
from common.pb import kv_transfer_pb2 as pb
from kv_transfer.assembly import Assembly, PieceRefused, Reason
from kv_transfer.checksum import CHECKSUM
from kv_transfer.codec import PieceCodec
from kv_transfer.heads import HeadRange
from kv_transfer.transport import KVPiece
from kv_transfer.wire import Manifest, PieceHeader, checksum_of, describe, flat_bytes
from kv_transfer.wire_dtype import WireDtype

TICKET = Ticket(b"t" * 16, 1, "source", "destination", num_tokens=12, skip_tokens=4)
FIRST_TOKEN = 77
LAYOUT = KVLayout("tiny", num_layers=5, num_kv_heads=2, head_dim=4, dtype="float32", rope="none")


@st.composite
def tilings(draw: st.DrawFn) -> list[PieceHeader]:
    """Any cut of layers × [skip_tokens, num_tokens) into rectangles, in any order, with arbitrary checksums."""
    rectangles = [(0, LAYOUT.num_layers, TICKET.skip_tokens, TICKET.num_tokens)]
    for _ in range(draw(st.integers(0, 8))):
        layer_start, layer_end, token_start, token_end = rectangles.pop(draw(st.integers(0, len(rectangles) - 1)))
        if draw(st.booleans()):
            middle = draw(st.integers(layer_start, layer_end))
            halves = [(layer_start, middle, token_start, token_end), (middle, layer_end, token_start, token_end)]
        else:
            middle = draw(st.integers(token_start, token_end))
            halves = [(layer_start, layer_end, token_start, middle), (layer_start, layer_end, middle, token_end)]
        rectangles += [half for half in halves if half[0] < half[1] and half[2] < half[3]]
    return [header(*rectangle, draw(st.integers(0, 2**64 - 1))) for rectangle in draw(st.permutations(rectangles))]


def header(layer_start: int, layer_end: int, token_start: int, token_end: int, checksum: int) -> PieceHeader:
    num_bytes = (layer_end - layer_start) * (token_end - token_start) * LAYOUT.token_layer_bytes
    return PieceHeader(TICKET, layer_start, layer_end, token_start, token_end, num_bytes, checksum)


def new_assembly(ticket: Ticket = TICKET) -> Assembly:
    return Assembly(ticket, LAYOUT.num_layers, lambda header: header.area * LAYOUT.token_layer_bytes)


def assemble(headers: list[PieceHeader], manifest: Manifest) -> Manifest:
    assembly = new_assembly()
    for part in headers:
        assembly.accept(part, part.num_bytes, part.checksum)
    return assembly.verify(TICKET, manifest)


@given(tilings())
def test_any_cut_in_any_order_is_accepted(headers: list[PieceHeader]) -> None:
    assert assemble(headers, Manifest.of(headers, FIRST_TOKEN)) == Manifest.of(reversed(headers), FIRST_TOKEN)


@given(tilings(), st.data())
def test_a_missing_piece_is_refused(headers: list[PieceHeader], data: st.DataObject) -> None:
    missing = data.draw(st.sampled_from(headers))
    arrived = [part for part in headers if part is not missing]
    with pytest.raises(PieceRefused) as refused:
        assemble(arrived, Manifest.of(headers, FIRST_TOKEN))
    assert refused.value.reason == Reason.INCOMPLETE


@given(tilings(), st.data())
def test_a_doubled_piece_is_refused(headers: list[PieceHeader], data: st.DataObject) -> None:
    doubled = data.draw(st.sampled_from(headers))
    with pytest.raises(PieceRefused) as refused:
        assemble([*headers, doubled], Manifest.of([*headers, doubled], FIRST_TOKEN))
    assert refused.value.reason == Reason.OVERLAP


@given(tilings(), st.data())
def test_a_shifted_piece_is_refused(headers: list[PieceHeader], data: st.DataObject) -> None:
    manifest = Manifest.of(headers, FIRST_TOKEN)
    index = data.draw(st.integers(0, len(headers) - 1))
    layers, tokens = data.draw(st.tuples(st.integers(-2, 2), st.integers(-2, 2)).filter(any))
    moved = headers[index]
    moved = replace(
        moved,
        layer_start=moved.layer_start + layers,
        layer_end=moved.layer_end + layers,
        token_start=moved.token_start + tokens,
        token_end=moved.token_end + tokens,
    )
    headers = [*headers[:index], moved, *headers[index + 1 :]]
    with pytest.raises(PieceRefused) as refused:
        assemble(headers, manifest)
    assert refused.value.reason in (Reason.RANGE, Reason.OVERLAP)


@given(tilings(), st.data())
def test_a_truncated_piece_is_refused(headers: list[PieceHeader], data: st.DataObject) -> None:
    part = data.draw(st.sampled_from(headers))
    size = data.draw(st.integers(0, 2 * part.num_bytes).filter(lambda size: size != part.num_bytes))
    for announced, received in ((part.num_bytes, size), (size, part.num_bytes), (size, size)):
        with pytest.raises(PieceRefused) as refused:
            new_assembly().accept(replace(part, num_bytes=announced), received, part.checksum)
        assert refused.value.reason == Reason.SIZE


@given(tilings(), st.data())
def test_a_piece_that_is_stretched_over_its_neighbour_is_refused(
    headers: list[PieceHeader], data: st.DataObject
) -> None:
    index = data.draw(st.integers(0, len(headers) - 1))
    part = headers[index]
    grown = header(part.layer_start, part.layer_end + 1, part.token_start, part.token_end, part.checksum)
    headers = [*headers[:index], grown, *headers[index + 1 :]]
    with pytest.raises(PieceRefused) as refused:
        assemble(headers, Manifest.of(headers, FIRST_TOKEN))
    assert refused.value.reason in (Reason.RANGE, Reason.OVERLAP)


@given(st.integers(0, 8 * 4 * LAYOUT.token_layer_bytes - 1))
def test_a_flipped_bit_is_refused(bit: int) -> None:
    piece = KVPiece(1, 4, torch.randn(1, 2, 4, 2, 4))
    flat = flat_bytes(piece.data)
    sent = describe(TICKET, piece, flat.numel(), checksum_of(flat))
    flat[bit // 8] ^= 1 << bit % 8
    with pytest.raises(PieceRefused) as refused:
        new_assembly().accept(sent, flat.numel(), checksum_of(flat))
    assert refused.value.reason == Reason.CHECKSUM


@pytest.mark.parametrize(
    "other",
    [
        replace(TICKET, transfer_id=b"u" * 16),
        replace(TICKET, attempt=2),
        replace(TICKET, source_incarnation="another"),
        replace(TICKET, destination_incarnation="another"),
        replace(TICKET, num_tokens=13),
        replace(TICKET, skip_tokens=0),
    ],
)
def test_another_identity_is_refused_in_pieces_and_commits(other: Ticket) -> None:
    part = replace(header(0, 1, 4, 5, checksum=1), ticket=other)
    with pytest.raises(PieceRefused) as refused:
        new_assembly().accept(part, part.num_bytes, 1)
    assert refused.value.reason == Reason.IDENTITY
    with pytest.raises(PieceRefused) as refused:
        new_assembly().verify(other, Manifest.of([], FIRST_TOKEN))
    assert refused.value.reason == Reason.IDENTITY


@given(tilings(), st.sampled_from(["num_pieces", "num_bytes", "checksum"]))
def test_a_commit_that_speaks_of_other_pieces_is_refused(headers: list[PieceHeader], field: str) -> None:
    manifest = Manifest.of(headers, FIRST_TOKEN)
    wrong = replace(manifest, **{field: getattr(manifest, field) ^ 1})
    with pytest.raises(PieceRefused) as refused:
        assemble(headers, wrong)
    assert refused.value.reason == Reason.MANIFEST


@given(tilings(), st.integers(0, 2**32 - 1), st.integers(0, 31), st.sampled_from([2, 3]))
def test_a_commit_whose_first_token_changed_on_the_way_is_refused(
    headers: list[PieceHeader], first_token: int, bit: int, version: int
) -> None:
    manifest = Manifest.of(headers, first_token, version)
    assert assemble(headers, manifest) == manifest
    with pytest.raises(PieceRefused) as refused:
        assemble(headers, replace(manifest, first_token=first_token ^ 1 << bit))
    assert refused.value.reason == Reason.MANIFEST


def test_a_commit_covers_what_its_protocol_version_says() -> None:
    headers = [header(0, 2, 4, 12, checksum=7), header(2, 3, 4, 12, checksum=8)]
    checksums, token = struct.pack("<2Q", 7, 8), struct.pack("<I", 9)
    ranges = struct.pack("<8I", 0, 2, 4, 12, 2, 3, 4, 12)
    for version, covered in ((1, checksums), (2, checksums + token), (3, ranges + token)):
        assert Manifest.of(reversed(headers), 9, version).checksum == CHECKSUM.of(covered)


def test_nothing_to_send_needs_no_piece() -> None:
    ticket = replace(TICKET, skip_tokens=12)
    assert new_assembly(ticket).verify(ticket, Manifest.of([], FIRST_TOKEN)) == Manifest.of([], FIRST_TOKEN)


@given(tilings())
def test_headers_survive_the_wire(headers: list[PieceHeader]) -> None:
    for part in headers:
        assert PieceHeader.from_pb(pb.Piece.FromString(part.to_pb().SerializeToString())) == part


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_tensor_is_its_bytes_without_a_copy(dtype: str) -> None:
    layout = replace(LAYOUT, dtype=dtype)
    piece = KVPiece(2, 5, torch.randn(3, 2, 7, 2, 4).to(getattr(torch, dtype)))
    flat = flat_bytes(piece.data)
    all_heads = HeadRange(0, layout.num_kv_heads)
    codec = PieceCodec(layout, all_heads, all_heads, WireDtype.SAME)
    again = codec.decode(describe(TICKET, piece, flat.numel(), checksum_of(flat)), flat)
    assert (again.layer_start, again.token_start) == (2, 5)
    assert torch.equal(again.data, piece.data)
    assert again.data.data_ptr() == piece.data.data_ptr()
    assert flat.numel() == piece.num_bytes == 21 * layout.token_layer_bytes
