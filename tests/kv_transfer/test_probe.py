"""What is made of a new link's measurements."""

from __future__ import annotations

import pytest

from kv_transfer.probe import link_speed


def test_bulk_that_was_quicker_than_every_round_trip_is_no_reason_for_a_miracle() -> None:
    speed = link_speed([0.008, 0.009, 0.008], [(65_536, 0.003), (262_144, 0.003)])
    assert speed.round_trip_s == 0.003
    assert speed.bytes_per_s == pytest.approx(262_144 / 0.0015)
