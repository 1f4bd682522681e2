"""What is made of a link's measurements: one busy moment does not end them, nor one busy time all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from common.errors import TransferError, TransferTimeout
from common.kv_layout import KVLayout
from kv_transfer import link_source
from kv_transfer.link_source import SourceLink
from kv_transfer.probe import link_speed, measure
from kv_transfer.transport import KVPiece, LinkSpeed
from tests.kv_transfer.wires import KINDS, NewWire, until

LAYOUT = KVLayout("wide", num_layers=1, num_kv_heads=2, head_dim=64, dtype="float32", rope="none")
STALL_S = 0.05


@dataclass
class StallingLink:
    """As fast as can be, but for the transfers whose numbers are given, the first being 0."""

    stalls: Sequence[int]
    sizes: list[int] = field(default_factory=list)  # of the transfers, in bytes
    agreement: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(
            source_heads=range(2), source_incarnation="p", destination_incarnation="d"
        )
    )

    def begin(self, *_: object) -> StallingLink:
        self.sizes.append(0)
        return self

    def send(self, piece: KVPiece) -> None:
        self.sizes[-1] += piece.data.nbytes

    async def commit(self, *_: object) -> None:
        if len(self.sizes) - 1 in self.stalls:
            await asyncio.sleep(STALL_S)


async def test_a_busy_moment_at_a_small_size_does_not_end_the_measurement() -> None:
    link = StallingLink(stalls=(3, 6, 8))  # of three sizes one try each, after three round trips
    speed = await measure(cast(SourceLink, link), LAYOUT)
    assert max(link.sizes) > 10_000_000
    assert speed.bytes_per_s > 10 * max(link.sizes[:7]) / STALL_S


async def test_a_link_that_is_slow_each_time_is_not_asked_for_more() -> None:
    link = StallingLink(stalls=range(3, 100))
    speed = await measure(cast(SourceLink, link), LAYOUT)
    assert len(link.sizes) == 5
    assert speed.bytes_per_s < 2 * 65_536 / STALL_S


def test_bulk_that_was_quicker_than_every_round_trip_is_no_reason_for_a_miracle() -> None:
    speed = link_speed([0.008, 0.009, 0.008], [(65_536, 0.003), (262_144, 0.003)])
    assert speed.round_trip_s == 0.003
    assert speed.bytes_per_s == pytest.approx(262_144 / 0.0015)


async def test_a_link_keeps_its_best_measurement_and_outlives_one_that_fails(
    new_wire: NewWire, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: list[LinkSpeed | TransferError] = [
        LinkSpeed(5e7, 0.0004),
        TransferTimeout("a busy machine"),
        LinkSpeed(2e9, 0.0009),
        LinkSpeed(1e9, 0.0002),
    ]

    async def measured(*_: object) -> LinkSpeed:
        result = results.pop(0)
        if isinstance(result, TransferError):
            raise result
        return result

    monkeypatch.setattr(link_source, "measure", measured)
    monkeypatch.setattr(link_source, "MEASURE_AGAIN_AFTER_S", (1.0, 0.0, 0.0))
    wire = await new_wire("loopback")
    landing, ticket = wire.expect(num_tokens=4)
    transfer = await wire.sender.open(wire.receiver.destination, ticket)
    assert [link.speed for link in wire.sender.links()] == [LinkSpeed(5e7, 0.0004)]
    await until(lambda: not results, "all measured")
    transfer.send(KVPiece(0, 0, wire.new_data(4)))
    await transfer.commit(1, timeout_s=5)
    await landing.reception.committed()
    assert [link.speed for link in wire.sender.links()] == [LinkSpeed(2e9, 0.0002)]


@pytest.mark.parametrize("kind", KINDS)
async def test_measurements_beside_transfers_are_nobodys_bytes(
    kind: str, new_wire: NewWire, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_measured = 0

    async def counted(link: SourceLink, layout: KVLayout) -> LinkSpeed:
        nonlocal num_measured
        speed = await measure(link, layout)
        num_measured += 1
        return speed

    monkeypatch.setattr(link_source, "measure", counted)
    monkeypatch.setattr(link_source, "MEASURE_AGAIN_AFTER_S", (0.0,) * 3)
    wire = await new_wire(kind)
    num_bytes = 0
    async with asyncio.timeout(60):
        while num_measured < 4:
            landing, ticket = wire.expect(num_tokens=9)
            transfer = await wire.sender.open(wire.receiver.destination, ticket)
            data = wire.new_data(9, seed=num_bytes)
            transfer.send(KVPiece(0, 0, data))
            await transfer.commit(1, timeout_s=5)
            await landing.reception.committed()
            assert torch.equal(landing.data, data)
            num_bytes += data.nbytes
    (link,) = wire.sender.links()
    assert link.num_bytes == wire.sender.stats.bytes == wire.receiver.stats.bytes == num_bytes
    assert wire.receiver.stats.stale_pieces == 0
