"""Pushes each layer group's KV to the decode worker while later layers and chunks are still being computed."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from engine.engine import Engine
from engine.sequence import SampledToken, ScheduledSequence, Sequence
from kv_transfer.plan import LayerGroups
from kv_transfer.transport import KVPiece, OutgoingTransfer


@dataclass(frozen=True)
class Push:
    """Where one sequence's KV goes. Tokens before `skip_tokens` are already there."""

    transfer: OutgoingTransfer
    skip_tokens: int


@dataclass(frozen=True)
class _Chunk:
    sequence: Sequence
    transfer: OutgoingTransfer
    token_start: int
    groups: LayerGroups


class KVPush:
    """A StepObserver: all of it runs on the engine's thread, in the middle of the step.

    Reading the KV copies it out of the cache, so the sequence's blocks may be freed as soon as the step ends.
    """

    def __init__(self, engine: Engine, piece_bytes: int) -> None:
        self._engine = engine
        self._piece_bytes = piece_bytes
        self._pushes: dict[Sequence, Push] = {}
        self._chunks: list[_Chunk] = []

    def attach(self, sequence: Sequence, push: Push) -> None:
        """Send this sequence's KV from its next step on."""
        self._pushes[sequence] = push

    def detach(self, sequence: Sequence) -> None:
        """Stop sending. Safe to call again."""
        self._pushes.pop(sequence, None)

    def on_scheduled(self, scheduled: Seq[ScheduledSequence]) -> None:
        self._chunks = [
            self._chunk(part, self._pushes[part.sequence]) for part in scheduled if part.sequence in self._pushes
        ]

    def on_layer_computed(self, layer: int) -> None:
        for chunk in self._chunks:
            for piece in chunk.groups.ready_after(layer):
                layers = (piece.layer_start, piece.layer_end)
                tokens = (chunk.token_start + piece.token_start, chunk.token_start + piece.token_end)
                data = self._engine.read_kv(chunk.sequence, layers, tokens)
                chunk.transfer.send(KVPiece(piece.layer_start, tokens[0], data))

    def on_sampled(self, sampled: Seq[SampledToken]) -> None:
        """The first token ends a sequence's stay on this worker, whatever it is."""
        for token in sampled:
            self.detach(token.sequence)
            self._engine.remove(token.sequence)

    def _chunk(self, part: ScheduledSequence, push: Push) -> _Chunk:
        start = max(part.start, push.skip_tokens)
        groups = LayerGroups(self._engine.layout, max(0, part.end - start), self._piece_bytes)
        return _Chunk(part.sequence, push.transfer, start, groups)
