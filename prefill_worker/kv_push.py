"""Pushes each layer group's KV to the decode worker while later layers and chunks are still being computed."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from engine.engine import Engine, OnLayerComputed
from engine.sequence import SampledToken, ScheduledSequence, Sequence
from kv_transfer.plan import LayerGroups
from kv_transfer.transport import KVPiece, OutgoingTransfer


@dataclass
class Push:
    """Where one sequence's KV goes, and from which token on it has yet to be sent."""

    transfer: OutgoingTransfer
    next_token: int  # at first the ticket's skip_tokens: those before are already there


@dataclass(frozen=True)
class _Chunk:
    """Tokens [token_start, token_start + groups.num_tokens) of one sequence, being computed."""

    sequence: Sequence
    transfer: OutgoingTransfer
    token_start: int
    groups: LayerGroups


class KVPush:
    """A StepObserver: all of it runs on the engine's thread, in the middle of the step.

    Reading the KV copies it out of the cache, so the sequence's blocks may be freed as soon as the step ends.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        engine.hold_back(self._is_held_back)
        self._pushes: dict[Sequence, Push] = {}
        self._chunks: list[_Chunk] = []

    def attach(self, sequence: Sequence, push: Push) -> None:
        """Send this sequence's KV from its next step on."""
        self._pushes[sequence] = push

    def detach(self, sequence: Sequence) -> None:
        """Stop sending. Safe to call again."""
        self._pushes.pop(sequence, None)

    def on_scheduled(self, scheduled: Seq[ScheduledSequence]) -> OnLayerComputed | None:
        self._chunks = []
        for part in scheduled:
            push = self._pushes.get(part.sequence)
            if push is not None:
                self._send_cached(part, push)
                self._chunks.append(self._next_chunk(part.sequence, push, part.end))
        return self._on_layer_computed if self._chunks else None

    def _on_layer_computed(self, layer: int) -> None:
        for chunk in self._chunks:
            self._send_ready(chunk, layer)

    def on_sampled(self, sampled: Seq[SampledToken]) -> None:
        """The first token ends a sequence's stay on this worker, whatever it is."""
        for token in sampled:
            self.detach(token.sequence)
            self._engine.remove(token.sequence)

    def _is_held_back(self, sequence: Sequence) -> bool:
        """Prefill is no faster than its link: while much is queued there, the sequence waits with what it has."""
        push = self._pushes.get(sequence)
        return push is not None and not push.transfer.has_room

    def _send_cached(self, part: ScheduledSequence, push: Push) -> None:
        """What the prefix cache had is not computed by any step: it leaves when the rest begins."""
        if push.next_token < part.start:
            cached = self._next_chunk(part.sequence, push, part.start)
            for layer in range(self._engine.layout.num_layers):
                self._send_ready(cached, layer)

    def _next_chunk(self, sequence: Sequence, push: Push, end: int) -> _Chunk:
        start, push.next_token = push.next_token, max(push.next_token, end)
        return _Chunk(
            sequence,
            push.transfer,
            start,
            LayerGroups(self._engine.layout, push.next_token - start, push.transfer.piece_bytes),
        )

    def _send_ready(self, chunk: _Chunk, layer: int) -> None:
        for piece in chunk.groups.ready_after(layer):
            layers = (piece.layer_start, piece.layer_end)
            tokens = (chunk.token_start + piece.token_start, chunk.token_start + piece.token_end)
            data = self._engine.read_kv(chunk.sequence, layers, tokens)
            chunk.transfer.send(KVPiece(piece.layer_start, tokens[0], data))
