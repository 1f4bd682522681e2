"""Sampling parameters, KV layouts and tickets: refused when wrong, unchanged by the wire."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidRequest, InvalidSampling, LayoutMismatch
from common.identity import Ticket, new_incarnation, new_transfer_id
from common.kv_layout import KVLayout
from common.pb import serving_pb2 as pb
from common.sampling import MAX_SEED, SamplingParams

LAYOUT = KVLayout("f00d", num_layers=4, num_kv_heads=2, head_dim=8, dtype="bfloat16", rope="theta=10000")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("temperature", -0.1),
        ("temperature", 2.5),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", float("nan")),
        ("top_k", -1),
        ("seed", -1),
        ("seed", MAX_SEED + 1),
    ],
)
def test_a_sampling_parameter_out_of_range_is_named(name: str, value: float) -> None:
    with pytest.raises(InvalidSampling, match=name) as raised:
        SamplingParams(**{"max_tokens": 1, name: value})  # type: ignore[arg-type]
    assert raised.value.param == name


@given(
    st.integers(1, 2**31),
    st.floats(0, 2),
    st.floats(0.01, 1),
    st.integers(0, 2**31),
    st.integers(0, MAX_SEED),
    st.booleans(),
    st.lists(st.integers(0, 2**31)),
)
def test_sampling_parameters_cross_the_wire_unchanged(
    max_tokens: int, temperature: float, top_p: float, top_k: int, seed: int, ignore_eos: bool, stops: list[int]
) -> None:
    params = SamplingParams(max_tokens, temperature, top_p, top_k, seed, ignore_eos, tuple(stops))
    assert SamplingParams.from_pb(pb.SamplingParams.FromString(params.to_pb().SerializeToString())) == params


def test_layouts_that_differ_in_any_field_are_refused_by_its_name_and_both_values() -> None:
    LAYOUT.require_compatible(replace(LAYOUT))
    for field in fields(KVLayout):
        mine = getattr(LAYOUT, field.name)
        theirs = mine + 1 if isinstance(mine, int) else "other"
        with pytest.raises(LayoutMismatch, match=f"{field.name}.*{mine}.*{theirs}"):
            LAYOUT.require_compatible(replace(LAYOUT, **{field.name: theirs}))


def test_a_layout_knows_its_sizes_and_crosses_the_wire() -> None:
    assert LAYOUT.token_layer_bytes == 2 * 2 * 8 * 2
    assert LAYOUT.token_bytes == 4 * LAYOUT.token_layer_bytes
    assert KVLayout.from_pb(LAYOUT.to_pb()) == LAYOUT


@pytest.mark.parametrize(
    "changes",
    [
        {"transfer_id": b""},
        {"transfer_id": b"short"},
        {"attempt": 0},
        {"source_incarnation": ""},
        {"destination_incarnation": ""},
        {"skip_tokens": 11},
    ],
)
def test_a_ticket_without_an_identity_is_refused(changes: dict[str, object]) -> None:
    ticket = Ticket(new_transfer_id(), 1, new_incarnation(), new_incarnation(), num_tokens=10)
    assert Ticket.from_pb(ticket.to_pb()) == ticket
    with pytest.raises(InvalidRequest):
        replace(ticket, **changes)  # type: ignore[arg-type]
