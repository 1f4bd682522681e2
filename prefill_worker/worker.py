"""A prefill worker: admit → step → send."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator

from common.identity import Ticket
from common.pb import serving_pb2 as pb
from common.sampling import SamplingParams
from engine.async_engine import AsyncEngine, Started
from engine.sequence import SampledToken, Sequence
from kv_transfer.transport import Destination, KVSender, OutgoingTransfer
from prefill_worker.kv_push import KVPush, Push


class PrefillWorker:
    """Computes prompts and pushes their KV. Holds no KV that nobody has promised to take."""

    def __init__(self, engine: AsyncEngine, kv_push: KVPush, sender: KVSender, commit_timeout_s: float) -> None:
        self._engine = engine
        self._kv_push = kv_push
        self._sender = sender
        self._commit_timeout_s = commit_timeout_s
        self.num_prefills = 0

    async def run(self, request: pb.PrefillRequest) -> AsyncGenerator[pb.PrefillEvent]:
        """PrefillStarted, the first token, then PrefillDone when the destination has verified all of the KV.

        If the first token ends the answer there is nothing to decode: no commit is sent.
        Raises: InvalidRequest, PromptTooLong, TransferError, IncompatiblePeer.
        """
        sequence = Sequence(
            list(request.token_ids), SamplingParams.from_pb(request.sampling), cache_salt=request.cache_salt
        )
        self._engine.limits.require_valid(sequence)
        ticket = Ticket.from_pb(request.ticket)
        transfer = await self._sender.open(Destination.from_pb(request.destination), ticket)
        try:
            async with self._engine.hosting(sequence) as events:
                self._push_and_add(sequence, Push(transfer, ticket.skip_tokens))
                async for event in events:
                    yield _event_pb(event)
                    if isinstance(event, SampledToken):
                        break
            assert isinstance(event, SampledToken)
            self.num_prefills += 1
            yield pb.PrefillEvent(done=await self._hand_over(event, transfer))
        finally:
            self._engine.post(lambda engine: self._kv_push.detach(sequence))
            transfer.abort()

    def _push_and_add(self, sequence: Sequence, push: Push) -> None:
        """A prompt whose answer is one token is never decoded, so its KV goes nowhere."""
        if sequence.sampling.max_tokens > 1:
            self._engine.post(lambda engine: self._kv_push.attach(sequence, push))
        self._engine.post(lambda engine: engine.add(sequence))

    async def _hand_over(self, first: SampledToken, transfer: OutgoingTransfer) -> pb.PrefillDone:
        if first.finish_reason is not None:
            return pb.PrefillDone()
        start_s = time.monotonic()
        receipt = await transfer.commit(first.token_id, self._commit_timeout_s)
        return pb.PrefillDone(
            transfer_bytes=receipt.num_bytes, num_pieces=receipt.num_pieces, transfer_s=time.monotonic() - start_s
        )


def _event_pb(event: Started | SampledToken) -> pb.PrefillEvent:
    if isinstance(event, Started):
        return pb.PrefillEvent(started=pb.PrefillStarted(cached_tokens=event.num_cached_tokens))
    return pb.PrefillEvent(
        first_token=pb.SampledToken(token_id=event.token_id, finish_reason=event.finish_reason or "")
    )
