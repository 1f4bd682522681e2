"""The other two ways to ask: the router's own gRPC API, and the workers without any router."""

from __future__ import annotations

import time
from collections.abc import Sequence

from common.identity import new_transfer_id
from common.pb import kv_transfer_pb2 as kv_pb
from common.pb import serving_pb2 as pb
from common.pb.serving_pb2_grpc import DecodeStub, InferenceStub, PrefillStub
from common.rpc import new_channel, typed_errors
from routerbench.answer import Answer, Question

TIMEOUT_S = 300.0


class GrpcClient:
    """Asks the router's Inference service for text, as the HTTP client does."""

    def __init__(self, address: str) -> None:
        self._channel = new_channel(address)
        self._inference = InferenceStub(self._channel)

    async def ask(self, question: Question) -> Answer:
        request = pb.GenerateRequest(prompt=question.text, sampling=_greedy(question.num_tokens))
        answer = Answer("", time.monotonic())
        with typed_errors("the router"):
            async for response in self._inference.Generate(request, timeout=TIMEOUT_S):
                answer.event_s.append(time.monotonic())
                answer.num_tokens += len(response.token_ids)
                answer.request_id = response.request_id
        answer.require_tokens(question.num_tokens)
        return answer

    async def close(self) -> None:
        await self._channel.close(grace=None)


class DirectClient:
    """Asks the workers themselves: what the router is compared with. One that computes its own prompts, or a pair."""

    def __init__(self, addresses: Sequence[str]) -> None:
        """addresses: of the prefill worker, where there is one, and of the one that decodes."""
        self._channels = [new_channel(address) for address in addresses]
        self._prefill = PrefillStub(self._channels[0]) if len(addresses) > 1 else None
        self._decode = DecodeStub(self._channels[-1])
        self._num_asked = 0

    async def ask(self, question: Question) -> Answer:
        self._num_asked += 1
        answer = Answer(f"direct-{self._num_asked}", time.monotonic())
        transfer_id = new_transfer_id()
        request = pb.DecodeRequest(
            request_id=answer.request_id,
            token_ids=question.token_ids,
            sampling=_greedy(question.num_tokens),
            transfer_id=transfer_id,
            compute_prompt=self._prefill is None,
        )
        with typed_errors("a worker"):
            async for event in self._decode.Generate(request, timeout=TIMEOUT_S):
                if event.HasField("token"):
                    answer.note_token()
                elif event.HasField("reserved"):
                    await self._run_prefill(question, answer, transfer_id, event.reserved)
        answer.require_tokens(question.num_tokens)
        return answer

    async def _run_prefill(self, question: Question, answer: Answer, transfer_id: bytes, reserved: pb.Reserved) -> None:
        assert self._prefill is not None
        request = pb.PrefillRequest(
            request_id=answer.request_id,
            token_ids=question.token_ids,
            sampling=_greedy(question.num_tokens),
            ticket=kv_pb.Ticket(transfer_id=transfer_id, attempt=1),
            destination=reserved.destination,
        )
        async for event in self._prefill.Run(request, timeout=TIMEOUT_S):
            if event.HasField("first_token"):
                answer.note_token()

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close(grace=None)


def _greedy(num_tokens: int) -> pb.SamplingParams:
    return pb.SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
