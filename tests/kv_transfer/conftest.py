from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from common.kv_layout import KVLayout
from tests.kv_transfer.wires import KINDS, NewWire, Wire, new_layout


@pytest.fixture
async def new_wire() -> AsyncIterator[NewWire]:
    wires: list[Wire] = []

    async def make(kind: str, layout: KVLayout | None = None) -> Wire:
        wire = Wire(kind, layout or new_layout())
        wires.append(wire)
        await wire.start()
        return wire

    yield make
    for wire in wires:
        await wire.close()


@pytest.fixture(params=KINDS)
async def wire(request: pytest.FixtureRequest, new_wire: NewWire) -> Wire:
    return await new_wire(request.param)
