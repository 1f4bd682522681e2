"""Takes KV from a link into the blocks of a reserved sequence."""

from __future__ import annotations

from collections.abc import Callable

from common.pb import serving_pb2 as pb
from engine.async_engine import AsyncEngine
from engine.engine import Engine
from engine.sequence import Sequence
from kv_transfer.transport import KVPiece, KVReceiver, Reception, Release


class KVIntake:
    """One receiver in front of one engine. Each piece is scattered between two steps, then its memory is given back."""

    def __init__(self, engine: AsyncEngine, receiver: KVReceiver) -> None:
        self._engine = engine
        self._receiver = receiver

    def expect(self, transfer_id: bytes, sequence: Sequence, skip_tokens: int) -> Reception:
        """For a sequence that is reserved. Raises: InvalidRequest for a bad id or one that is expected already."""

        def scatter(piece: KVPiece, release: Release) -> None:
            self._engine.post(_write_kv(sequence, piece), then=release)

        return self._receiver.expect(transfer_id, sequence.num_prompt_tokens, skip_tokens, scatter)

    def reserved(self, skip_tokens: int) -> pb.Reserved:
        """What tells the source where to send it."""
        return pb.Reserved(destination=self._receiver.destination.to_pb(), skip_tokens=skip_tokens)


def _write_kv(sequence: Sequence, piece: KVPiece) -> Callable[[Engine], None]:
    return lambda engine: engine.write_kv(sequence, piece.layer_start, piece.token_start, piece.data, piece.head_start)
