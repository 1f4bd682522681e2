"""Channels are closed by whoever comes first, and sometimes by two at once."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

import pytest

from common.errors import ServingError
from kv_transfer.factory import Surroundings, new_way
from kv_transfer.heads import HeadRange
from kv_transfer.link import Endpoint, SourceChannel, Way
from kv_transfer.sender import LinkSender
from tests.kv_transfer.wires import CPU, SOCKETS, NewWire


@pytest.mark.parametrize("kind", SOCKETS)
async def test_a_close_that_is_cancelled_halfway_is_finished_by_the_next_one(kind: str, new_wire: NewWire) -> None:
    wire = await new_wire(kind)
    dial = new_way(kind, Surroundings(CPU)).dial
    channels: list[SourceChannel] = []

    def dial_and_keep(address: str) -> SourceChannel:
        channels.append(dial(address))
        return channels[-1]

    endpoint = Endpoint(wire.layout, wire.source_incarnation, HeadRange(0, wire.layout.num_kv_heads))
    sender = LinkSender(endpoint, [Way(kind, dial_and_keep)], wire.config)
    _, ticket = wire.expect(num_tokens=8)
    await sender.open(wire.receiver.destination, ticket)
    first = asyncio.create_task(channels[0].close())
    await asyncio.sleep(0)
    first.cancel()
    await channels[0].close()
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("kv-send-")] == []
    with suppress(asyncio.CancelledError, ServingError):
        await first
    await sender.close()
