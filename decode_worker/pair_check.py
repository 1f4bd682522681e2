"""The self-test of a pair: the KV that a prefill worker sends against what this worker computes for the same prompt.

    reserve ─▶ Reserved ─▶ KV arrives ─▶ verified ───┐
    add ─▶ this engine computes the prompt ─▶ copied ─┴─▶ compared layer by layer ─▶ verdict

Both are sequences of the engine like any others, beside those that serve. The first tokens are not compared: a near-tie
would need the logits, and what makes them beyond the last layer's K and V is the model's, never the transfer's.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from collections.abc import Sequence as Seq
from contextlib import closing

from torch import Tensor

from common.pb import serving_pb2 as pb
from common.sampling import SamplingParams
from decode_worker.intake import KVIntake
from decode_worker.kv_comparison import Comparison, LayerError, compare_layer, tolerance
from engine.async_engine import AsyncEngine
from engine.engine import Engine
from engine.sequence import SampledToken, ScheduledSequence, Sequence
from kv_transfer.wire_dtype import WireDtype

# One token is sampled and the prompt's KV is copied before there is a second one.
_SAMPLING = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)


class PromptCapture:
    """A StepObserver: copies a watched prompt's KV when its first token is sampled, which ends the sequence's stay.

    All of it runs on the engine's thread.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._captured: dict[Sequence, Tensor | None] = {}  # None: not computed yet

    def watch(self, sequence: Sequence) -> None:
        self._captured[sequence] = None

    def forget(self, sequence: Sequence) -> None:
        self._captured.pop(sequence, None)

    def captured(self, sequence: Sequence) -> Tensor:
        """[layers, 2, prompt tokens, kv_heads, head_dim], once the first token is out."""
        kv = self._captured[sequence]
        assert kv is not None, "captured before the first token was sampled"
        return kv

    def on_scheduled(self, scheduled: Seq[ScheduledSequence]) -> None:
        pass

    def on_sampled(self, sampled: Seq[SampledToken]) -> None:
        for sequence in [token.sequence for token in sampled if token.sequence in self._captured]:
            num_layers = self._engine.layout.num_layers
            self._captured[sequence] = self._engine.read_kv(sequence, (0, num_layers), (0, sequence.num_prompt_tokens))
            self._engine.remove(sequence)


class PairCheck:
    """Answers CheckPair. `capture` must be the engine's tap, `wire_dtype` the receiver's."""

    def __init__(self, engine: AsyncEngine, intake: KVIntake, capture: PromptCapture, wire_dtype: WireDtype) -> None:
        self._engine = engine
        self._intake = intake
        self._capture = capture
        self._wire_dtype = wire_dtype

    async def run(self, request: pb.PairCheckRequest) -> AsyncGenerator[pb.PairCheckEvent]:
        """Reserved, then the verdict. Closing the stream at any point frees the blocks of both sequences.

        The salt is fresh: nothing cached is read, and what the prefix cache keeps of this nobody will ever ask for.
        Raises: NoFreeBlocks, InvalidRequest, PromptTooLong.
        """
        tolerated = tolerance(self._engine.layout, request.source_dtype, self._wire_dtype)
        salt = secrets.token_bytes(16)
        received, computed = [Sequence(list(request.token_ids), _SAMPLING, cache_salt=salt) for _ in range(2)]
        self._engine.limits.require_valid(received)
        async with self._engine.hosting(received), self._engine.hosting(computed) as events:
            skip_tokens = await self._engine.call(lambda engine: engine.reserve(received))
            try:
                self._engine.post(lambda engine: self._compute(engine, computed))
                with closing(self._intake.expect(request.transfer_id, received, skip_tokens)) as reception:
                    yield pb.PairCheckEvent(reserved=self._intake.reserved(skip_tokens))
                    await reception.committed()
                async for event in events:
                    if isinstance(event, SampledToken):
                        break
                errors = await self._engine.call(lambda engine: self._compare(engine, received, computed))
                yield pb.PairCheckEvent(verdict=_verdict(Comparison(errors, tolerated)))
            finally:
                self._engine.post(lambda engine: self._capture.forget(computed))

    def _compute(self, engine: Engine, sequence: Sequence) -> None:
        self._capture.watch(sequence)
        engine.add(sequence)

    def _compare(self, engine: Engine, received: Sequence, computed: Sequence) -> list[LayerError]:
        """Between two steps; a layer takes some tens of microseconds."""
        local = self._capture.captured(computed)
        errors: list[LayerError] = []
        for layer in range(engine.layout.num_layers):
            theirs = engine.read_kv(received, (layer, layer + 1), (0, received.num_prompt_tokens))
            errors += compare_layer(layer, theirs, local[layer : layer + 1])
        return errors


def _verdict(comparison: Comparison) -> pb.PairVerdict:
    return pb.PairVerdict(is_equal=not comparison.disagreeing, detail=comparison.detail)
