"""What is measured, in which order: transport by transport, size by size, everything again for every pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from common.transfer_config import TransferConfig
from kv_transfer.checksum import CHECKSUM
from transferbench.goals import YARDSTICKS
from transferbench.link import RawLink, Sample, TransportLink, linked, raw_linked
from transferbench.payload import MB, Payload, new_payload
from transferbench.peer import Peer

ENOUGH_BYTES = 64 * MB  # for one sample; small transfers are repeated until they come to this
MAX_COUNT = 32

Say = Callable[[str], None]


@dataclass(frozen=True)
class TransferPlan:
    sizes: Sequence[int]  # MB
    piece_bytes: int | None  # None: as the link's speed suggests
    repeats: int
    say: Say  # told in a few words what has just been done


@dataclass(frozen=True)
class Pass:
    """One size over one transport, everything within a moment of each other."""

    num_pieces: int
    transfer: Sample
    limit: Sample
    beside: Sample | None
    checksum_s: float  # the same pieces hashed once


async def measure_transport(name: str, plan: TransferPlan) -> dict[int, list[Pass]]:
    """By size in MB; between this process and a new one.

    Raises: ConfigError where there is no such transport here; ServingError, OSError, RuntimeError when it fails.
    """
    yardstick = YARDSTICKS[name]
    with Peer() as peer:
        async with AsyncExitStack() as stack:
            config = TransferConfig(transport=name, piece_bytes=plan.piece_bytes)
            link = await stack.enter_async_context(linked(peer, config))
            limit = await stack.enter_async_context(raw_linked(peer, yardstick.limit))
            beside = None
            if yardstick.beside is not None:
                beside = await stack.enter_async_context(raw_linked(peer, yardstick.beside))
            subjects = _Subjects(link, limit, beside)
            piece_bytes = await link.piece_bytes()
            passes: dict[int, list[Pass]] = {}
            for size in plan.sizes:
                payload = new_payload(size * MB, piece_bytes)
                passes[size] = [await _one_pass(subjects, payload) for _ in range(plan.repeats)]
                plan.say(f"{name}: {size} MB")
            return passes


@dataclass(frozen=True)
class _Subjects:
    link: TransportLink
    limit: RawLink
    beside: RawLink | None


async def _one_pass(subjects: _Subjects, payload: Payload) -> Pass:
    """The limit right before the transport, so that both meet the same machine."""
    count = min(MAX_COUNT, max(1, ENOUGH_BYTES // payload.num_bytes))
    beside = None if subjects.beside is None else await subjects.beside.sample(payload, count)
    limit = await subjects.limit.sample(payload, count)
    transfer = await subjects.link.sample(payload, count)
    return Pass(len(payload.pieces), transfer, limit, beside, hash_s(payload, count))


def hash_s(payload: Payload, count: int) -> float:
    """Of hashing every piece once, on average over `count` times and one before them."""
    buffers = payload.buffers
    _hash(buffers)
    start_s = time.perf_counter()
    for _ in range(count):
        _hash(buffers)
    return (time.perf_counter() - start_s) / count


def _hash(buffers: Sequence[memoryview]) -> None:
    for buffer in buffers:
        CHECKSUM.of(buffer)
