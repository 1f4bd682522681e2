"""Measures a link, with transfers that belong to nobody and take the same path as everybody's.

Round trip: commits without pieces. Bandwidth: four times as many bytes each time, twice, until both take long enough to
mean something. Hashing and staging are part of both, as they are part of every transfer.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from common.identity import Ticket
from common.kv_layout import KVLayout
from kv_transfer.codec import DTYPES
from kv_transfer.transport import KVPiece, LinkSpeed, TransferStats
from kv_transfer.wire import PROBE_ID

if TYPE_CHECKING:
    from kv_transfer.link_source import SourceLink

_ROUND_TRIPS = 3
_SIZES = tuple(64 * 1024 * 4**step for step in range(5))  # up to 16 MB, in pieces of at most _PIECE_BYTES
_PIECE_BYTES = 1024 * 1024
_ENOUGH_S = 0.02
_TRIES = 2  # of each size: one alone may have met a busy moment
_TIMEOUT_S = 5.0  # without anything moving


async def measure(link: SourceLink, layout: KVLayout) -> LinkSpeed:
    """Takes some tens of milliseconds; a link of 1 MB/s a third of a second.

    The best rate counts: a machine with other work never makes a link faster. Not twice at a time on one link.

    Raises: PeerLost, TransferTimeout, TransferAborted when the link is closed meanwhile.
    """
    attempts = itertools.count(1)

    async def timed(num_bytes: int) -> tuple[int, float]:
        """What was sent, in whole tokens, and how long it took to be confirmed."""
        tokens_per_piece = max(1, min(num_bytes, _PIECE_BYTES) // layout.token_layer_bytes)
        num_pieces = num_bytes // (tokens_per_piece * layout.token_layer_bytes)
        heads = len(link.agreement.source_heads)
        data = torch.ones(1, 2, tokens_per_piece, heads, layout.head_dim, dtype=DTYPES[layout.dtype])
        transfer = link.begin(_ticket(link, next(attempts), tokens_per_piece * num_pieces), TransferStats())
        start_s = time.perf_counter()
        for index in range(num_pieces):
            transfer.send(KVPiece(0, index * tokens_per_piece, data))
        await transfer.commit(0, _TIMEOUT_S)
        return num_pieces * data.numel() * data.element_size(), time.perf_counter() - start_s

    round_trips_s = [(await timed(0))[1] for _ in range(_ROUND_TRIPS)]
    samples: list[tuple[int, float]] = []
    for size in _SIZES:
        tries = [await timed(max(size, layout.token_layer_bytes)) for _ in range(_TRIES)]
        samples += tries
        if min(seconds for _, seconds in tries) > _ENOUGH_S:
            break
    return link_speed(round_trips_s, samples)


def link_speed(round_trips_s: Sequence[float], samples: Sequence[tuple[int, float]]) -> LinkSpeed:
    """samples: bytes, and seconds until they were confirmed, which no round trip can be longer than."""
    round_trip_s = min(*round_trips_s, *(seconds for _, seconds in samples))
    return LinkSpeed(max(num_bytes / (seconds - round_trip_s / 2) for num_bytes, seconds in samples), round_trip_s)


def _ticket(link: SourceLink, attempt: int, num_tokens: int) -> Ticket:
    ends = (link.agreement.source_incarnation, link.agreement.destination_incarnation)
    return Ticket(PROBE_ID, attempt, *ends, num_tokens)
