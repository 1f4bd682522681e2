"""A decode worker: reserve → receive → step → stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import closing

from common.pb import serving_pb2 as pb
from common.sampling import SamplingParams
from decode_worker.intake import KVIntake
from engine.async_engine import AsyncEngine, Started
from engine.sequence import SampledToken, Sequence


class DecodeWorker:
    """One engine and one KV intake. Never runs a sequence whose KV is not complete and verified."""

    def __init__(self, engine: AsyncEngine, intake: KVIntake) -> None:
        self._engine = engine
        self._intake = intake
        self.num_local_prefills = 0
        self.num_received_prefills = 0

    async def generate(self, request: pb.DecodeRequest) -> AsyncGenerator[pb.DecodeEvent]:
        """Reserved (unless colocated), DecodeStarted, then tokens up to a finish reason.

        Closing the stream at any point frees the sequence's blocks.
        Raises: NoFreeBlocks, InvalidRequest, PromptTooLong.
        """
        sequence = Sequence(
            list(request.token_ids), SamplingParams.from_pb(request.sampling), cache_salt=request.cache_salt
        )
        self._engine.limits.require_valid(sequence)
        async with self._engine.hosting(sequence) as events:
            if request.compute_prompt:
                self.num_local_prefills += 1
                self._engine.post(lambda engine: engine.add(sequence))
            else:
                skip_tokens = await self._engine.call(lambda engine: engine.reserve(sequence))
                with closing(self._intake.expect(request.transfer_id, sequence, skip_tokens)) as reception:
                    yield pb.DecodeEvent(reserved=self._intake.reserved(skip_tokens))
                    committed = await reception.committed()
                self.num_received_prefills += 1
                self._engine.post(lambda engine: engine.activate(sequence, committed.first_token))
            async for event in events:
                yield _event_pb(event)


def _event_pb(event: Started | SampledToken) -> pb.DecodeEvent:
    if isinstance(event, Started):
        return pb.DecodeEvent(started=pb.DecodeStarted(cached_tokens=event.num_cached_tokens))
    return pb.DecodeEvent(token=pb.SampledToken(token_id=event.token_id, finish_reason=event.finish_reason or ""))
