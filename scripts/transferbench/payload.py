"""What is sent: the KV of a prompt of a mid-sized model, cut as a prefill worker cuts it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from common.kv_layout import KVLayout
from kv_transfer.codec import DTYPES
from kv_transfer.plan import LayerGroups, PieceRange
from kv_transfer.transport import KVPiece
from kv_transfer.wire import buffer_of, flat_bytes

MB = 1024 * 1024
LAYOUT = KVLayout("bench", num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16", rope="none")


@dataclass(frozen=True)
class Payload:
    """One prompt's KV, each piece in memory of its own."""

    num_tokens: int
    pieces: Sequence[KVPiece]

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes)

    @property
    def sizes(self) -> list[int]:
        return [piece.num_bytes for piece in self.pieces]

    @property
    def buffers(self) -> list[memoryview]:
        return [buffer_of(flat_bytes(piece.data)) for piece in self.pieces]


def new_payload(num_bytes: int, piece_bytes: int) -> Payload:
    """num_bytes: a multiple of LAYOUT.token_bytes. piece_bytes: as transfer.piece_bytes in serve.yaml."""
    num_tokens = num_bytes // LAYOUT.token_bytes
    groups = LayerGroups(LAYOUT, num_tokens, piece_bytes)
    cuts = [part for layer in range(LAYOUT.num_layers) for part in groups.ready_after(layer)]
    noise = torch.randint(256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    edges = pairwise(accumulate((_num_bytes(cut) for cut in cuts), initial=0))
    pieces = [
        KVPiece(cut.layer_start, cut.token_start, noise[start:end].view(DTYPES[LAYOUT.dtype]).view(_shape(cut)))
        for cut, (start, end) in zip(cuts, edges, strict=True)
    ]
    return Payload(num_tokens, pieces)


def _shape(cut: PieceRange) -> tuple[int, ...]:
    num_layers, num_tokens = cut.layer_end - cut.layer_start, cut.token_end - cut.token_start
    return num_layers, 2, num_tokens, LAYOUT.num_kv_heads, LAYOUT.head_dim


def _num_bytes(cut: PieceRange) -> int:
    return (cut.layer_end - cut.layer_start) * (cut.token_end - cut.token_start) * LAYOUT.token_layer_bytes
