"""Measures a new link once, with transfers that belong to nobody and take the same path as everybody's.

Round trip: commits without pieces. Bandwidth: pieces of the size that long prompts use, twice as many each time until
they take long enough to mean something. Hashing and staging are part of both, as they are part of every transfer.
"""

from __future__ import annotations

import itertools
import time

import torch

from common.identity import Ticket
from common.kv_layout import KVLayout
from kv_transfer.codec import DTYPES
from kv_transfer.link_source import SourceLink
from kv_transfer.transport import KVPiece, LinkSpeed, TransferStats
from kv_transfer.wire import PROBE_ID

_ROUND_TRIPS = 3
_PIECE_BYTES = 1024 * 1024
_ENOUGH_S = 0.01
_MAX_PIECES = 16
_TIMEOUT_S = 5.0


async def measure(link: SourceLink, layout: KVLayout) -> LinkSpeed:
    """Takes a few tens of milliseconds, more over slow links. Raises: PeerLost, TransferTimeout."""
    attempts = itertools.count(1)
    num_tokens = max(1, _PIECE_BYTES // layout.token_layer_bytes)
    data = torch.ones(1, 2, num_tokens, len(link.agreement.source_heads), layout.head_dim, dtype=DTYPES[layout.dtype])

    async def timed(num_pieces: int) -> float:
        ticket = Ticket(
            PROBE_ID,
            next(attempts),
            link.agreement.source_incarnation,
            link.agreement.destination_incarnation,
            num_tokens * num_pieces,
        )
        transfer = link.begin(ticket, TransferStats())
        start_s = time.perf_counter()
        for index in range(num_pieces):
            transfer.send(KVPiece(0, index * num_tokens, data))
        await transfer.commit(0, _TIMEOUT_S)
        return time.perf_counter() - start_s

    round_trip_s = min([await timed(0) for _ in range(_ROUND_TRIPS)])
    num_pieces = 1
    while (seconds := await timed(num_pieces)) < _ENOUGH_S and num_pieces < _MAX_PIECES:
        num_pieces *= 2
    if seconds < _ENOUGH_S * 10:  # a fast link: what else the machine did may have cost more than the link
        seconds = min(seconds, await timed(num_pieces))
    num_bytes = num_pieces * data.numel() * data.element_size()
    return LinkSpeed(num_bytes / max(1e-9, seconds - round_trip_s), round_trip_s)
