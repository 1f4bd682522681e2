"""The shape of a KV cache, as two workers must agree on it before any of it moves."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from common.errors import LayoutMismatch
from common.pb import kv_transfer_pb2 as pb

_ADVICE = {
    "dtype": "; set model.dtype alike",
    "model_fingerprint": "; give both the same files as model.source",
}
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class KVLayout:
    """Everything that gives a KV byte its meaning, apart from block size and block ids, which are each side's own."""

    model_fingerprint: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    rope: str

    @property
    def token_layer_bytes(self) -> int:
        """K and V of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """K and V of one token in all layers."""
        return self.num_layers * self.token_layer_bytes

    def require_compatible(self, peer: KVLayout, me: str = "this side", them: str = "the peer") -> None:
        """Raises: LayoutMismatch naming the first field that differs and both values."""
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(peer, field.name)
            if mine != theirs:
                values = f"{me} has {mine!r}, {them} has {theirs!r}"
                raise LayoutMismatch(f"KV layouts differ in {field.name}: {values}{_ADVICE.get(field.name, '')}")

    def with_dtype(self, dtype: str) -> KVLayout:
        return replace(self, dtype=dtype)

    def to_pb(self) -> pb.KVLayout:
        return pb.KVLayout(**{field.name: getattr(self, field.name) for field in fields(self)})

    @staticmethod
    def from_pb(message: pb.KVLayout) -> KVLayout:
        return KVLayout(**{field.name: getattr(message, field.name) for field in fields(KVLayout)})
