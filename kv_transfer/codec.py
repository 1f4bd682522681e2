"""What a piece's bytes are on one link: which heads, in which encoding, for which tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from common.kv_layout import KVLayout
from kv_transfer.heads import HeadRange
from kv_transfer.transport import KVPiece
from kv_transfer.wire import PieceHeader
from kv_transfer.wire_dtype import ENCODINGS, Encoding, WireDtype

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, eq=False)
class PieceCodec:
    """The destination's view of one link. `heads` is the link's part of `own_heads`, the destination's."""

    layout: KVLayout
    heads: HeadRange
    own_heads: HeadRange
    wire_dtype: WireDtype

    def num_bytes(self, header: PieceHeader) -> int:
        """What the header's range takes on the wire."""
        return self._encoding.num_bytes(self._shape(header), self._dtype)

    def decode(self, header: PieceHeader, flat: Tensor) -> KVPiece:
        """A verified payload ([num_bytes] uint8, on any device) as the tensor it was; shares its memory if it can."""
        data = self._encoding.decode(flat, self._shape(header), self._dtype)
        return KVPiece(header.layer_start, header.token_start, data, self.heads.within(self.own_heads).start)

    def _shape(self, header: PieceHeader) -> tuple[int, int, int, int, int]:
        layers, tokens = header.layer_end - header.layer_start, header.token_end - header.token_start
        return (layers, 2, tokens, len(self.heads), self.layout.head_dim)

    @cached_property
    def _encoding(self) -> Encoding:
        return ENCODINGS[self.wire_dtype]

    @cached_property
    def _dtype(self) -> torch.dtype:
        return DTYPES[self.layout.dtype]
