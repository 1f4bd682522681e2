"""What is made of a new link's measurements, and that one busy moment does not end them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import pytest

from common.kv_layout import KVLayout
from kv_transfer.link_source import SourceLink
from kv_transfer.probe import link_speed, measure
from kv_transfer.transport import KVPiece

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
