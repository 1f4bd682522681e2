"""How one prefill chunk is cut into pieces, decided layer by layer while the chunk is still being computed.

Small pieces waste time on messages, large ones wait for layers that are still to come (LESSONS 29, 30, 32):

    layers      0   1   2   3   4   5   6         a chunk of few tokens: three layers reach `piece_bytes`
    groups     [0 .. 2]    [3 .. 5]    [6]        pieces leave after layers 2, 5 and 6
    tokens     one layer of a long chunk is more than twice as large: it is cut into equal token ranges
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import ceil

from common.kv_layout import KVLayout
from kv_transfer.transport import LinkSpeed

# Bounds the time that hashing or copying one piece can hold an event loop: about a millisecond.
MAX_PLANNED_BYTES = 4 * 1024 * 1024
MAX_AIM_BYTES = MAX_PLANNED_BYTES // 2
MIN_PIECE_BYTES = 256 * 1024  # smaller ones cost more than their bytes on any transport; also where nobody measured


def suitable_piece_bytes(speed: LinkSpeed | None, piece_round_trips: float = 0.5) -> int:
    """The aim for pieces on a link: large enough that what each costs by itself is small beside its bytes; no larger,
    since the last one cannot overlap with anything.

    piece_round_trips: that cost; by default half a round trip of Python on both sides.
    """
    if speed is None:
        return MIN_PIECE_BYTES
    cost_in_bytes = speed.bytes_per_s * speed.round_trip_s * piece_round_trips
    return min(max(MIN_PIECE_BYTES, int(4 * cost_in_bytes)), MAX_AIM_BYTES)


@dataclass(frozen=True)
class PieceRange:
    """Layers [layer_start, layer_end) of tokens [token_start, token_end), counted from the chunk's first token."""

    layer_start: int
    layer_end: int
    token_start: int
    token_end: int


@dataclass(frozen=True)
class LayerGroups:
    """The cut of one chunk of `num_tokens` tokens. A piece has at least `piece_bytes` (at most MAX_AIM_BYTES) where the
    chunk has enough layers left, and at most twice as many unless a single token of a single layer is larger."""

    layout: KVLayout
    num_tokens: int
    piece_bytes: int

    def ready_after(self, layer: int) -> list[PieceRange]:
        """The pieces that this layer completes, given that every layer below it is computed; often none."""
        layer_end = layer + 1
        is_group_end = layer_end % self._layers_per_group == 0 or layer_end == self.layout.num_layers
        if self.num_tokens == 0 or not is_group_end:
            return []
        layer_start = layer - layer % self._layers_per_group
        return [PieceRange(layer_start, layer_end, start, end) for start, end in self._token_ranges]

    @property
    def _aim(self) -> int:
        return min(self.piece_bytes, MAX_AIM_BYTES)

    @property
    def _layers_per_group(self) -> int:
        wanted = ceil(self._aim / max(1, self.num_tokens * self.layout.token_layer_bytes))
        return min(max(1, wanted), self.layout.num_layers)

    @property
    def _token_ranges(self) -> list[tuple[int, int]]:
        token_bytes = self._layers_per_group * self.layout.token_layer_bytes
        max_tokens = max(1, 2 * self._aim // token_bytes)  # a group of several layers overshoots by less than one
        num_ranges = ceil(self.num_tokens / max_tokens)
        edges = [self.num_tokens * index // num_ranges for index in range(num_ranges + 1)]
        return list(pairwise(edges))
