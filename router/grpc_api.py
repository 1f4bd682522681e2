"""The gRPC API for clients: pdserve.v1.Inference."""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import aclosing
from typing import Any

import grpc

from common.errors import DeadlineExceeded, InvalidRequest
from common.pb import serving_pb2 as pb
from common.pb import serving_pb2_grpc as pb_grpc
from common.rpc import answering
from common.tracing import carrier_of
from router.answer import AnswerDelta
from router.chat_template import ChatMessage
from router.frontend import Frontend
from router.grpc_gate import tenant_of
from router.priority_lanes import Priority
from router.request import Request
from router.validation import Wish

Context = grpc.aio.ServicerContext[Any, Any]

ROLES = ("system", "user", "assistant")
PRIORITIES = {
    pb.PRIORITY_UNSPECIFIED: Priority.NORMAL,
    pb.PRIORITY_HIGH: Priority.HIGH,
    pb.PRIORITY_NORMAL: Priority.NORMAL,
    pb.PRIORITY_LOW: Priority.LOW,
}


class InferenceServicer(pb_grpc.InferenceServicer):
    """A client that cancels, or whose deadline passes, cancels this coroutine, and so the request everywhere."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    async def Generate(self, message: pb.GenerateRequest, context: Context) -> None:
        async with answering(context):
            tenant = tenant_of(self._frontend.gate, context.invocation_metadata())
            self._require_small(message)
            wish = _wish(message, context)
            request = await self._frontend.accept(wish, secrets.token_hex(12), tenant)
            await self._stream(request, wish, context)

    async def ListModels(self, _: pb.ListModelsRequest, __: Context) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[self._frontend.model.name])

    async def _stream(self, request: Request, wish: Wish, context: Context) -> None:
        # writes rather than yields, so that a cancelled call always unwinds through here
        try:
            async with (
                asyncio.timeout(request.deadline_s + STALL_S - time.monotonic()),
                aclosing(self._frontend.answer(request, wish)) as deltas,
            ):
                has_begun = False
                async for delta in deltas:
                    if not has_begun:
                        has_begun = True
                        await context.send_initial_metadata(self._limits(request))
                    await context.write(_response(delta, request))
        except TimeoutError as error:
            raise DeadlineExceeded("the client stopped reading its stream") from error

    def _require_small(self, message: pb.GenerateRequest) -> None:
        if (num_bytes := message.ByteSize()) > (most := self._frontend.max_request_bytes()):
            raise InvalidRequest(f"the message has {num_bytes} bytes; at most {most} are read")

    def _limits(self, request: Request) -> tuple[tuple[str, str], ...]:
        """What is left of this key's limits, by the names that the HTTP API has for it."""
        return tuple(self._frontend.gate.limit_headers(request.tenant).items())


STALL_S = 5.0  # after its deadline a stream may still take this long to reach a slow client


def _wish(message: pb.GenerateRequest, context: Context) -> Wish:
    sampling = message.sampling
    return Wish(
        prompt=_prompt(message),
        model=message.model or None,
        max_tokens=sampling.max_tokens if sampling.HasField("max_tokens") else None,
        temperature=sampling.temperature if sampling.HasField("temperature") else None,
        top_p=sampling.top_p if sampling.HasField("top_p") else None,
        top_k=sampling.top_k,
        seed=sampling.seed if sampling.HasField("seed") else None,
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=tuple(sampling.stop_token_ids),
        stop=tuple(message.stop),
        timeout_s=context.time_remaining(),
        priority=_priority(message),
        caller=carrier_of(context.invocation_metadata()),
    )


def _priority(message: pb.GenerateRequest) -> Priority:
    if message.priority not in PRIORITIES:
        raise InvalidRequest(f"{message.priority} is no priority", param="priority")
    return PRIORITIES[message.priority]


def _prompt(message: pb.GenerateRequest) -> str | list[int] | list[ChatMessage]:
    match message.WhichOneof("input"):
        case "prompt":
            return message.prompt
        case "prompt_token_ids":
            return list(message.prompt_token_ids.ids)
        case "chat":
            return [_chat_message(each) for each in message.chat.messages]
        case _:
            raise InvalidRequest("one of prompt, prompt_token_ids and chat must be set", param="input")


def _chat_message(message: pb.ChatMessage) -> ChatMessage:
    if message.role not in ROLES:
        raise InvalidRequest(f"the role {message.role!r} is not one of {', '.join(ROLES)}", param="chat")
    return ChatMessage(message.role, message.content)


def _response(delta: AnswerDelta, request: Request) -> pb.GenerateResponse:
    response = pb.GenerateResponse(text=delta.text, token_ids=delta.token_ids, request_id=request.request_id)
    if delta.finish_reason is not None and delta.usage is not None:
        response.finish_reason = delta.finish_reason
        response.usage.prompt_tokens = delta.usage.prompt_tokens
        response.usage.completion_tokens = delta.usage.completion_tokens
        response.usage.cached_tokens = delta.usage.cached_tokens
        response.timings.CopyFrom(_timings(request))
    return response


def _timings(request: Request) -> pb.Timings:
    timeline = request.timeline
    return pb.Timings(
        stages=[pb.Stage(name=stage, seconds=seconds) for stage, seconds in timeline.stages.items()],
        ttft_s=timeline.ttft_s or 0.0,
        tpot_s=timeline.tpot_s or 0.0,
        end_to_end_s=timeline.end_to_end_s,
        prefill_worker=request.prefill_worker,
        decode_worker=request.decode_worker,
        attempts=request.attempts,
        placement=request.placement,
    )
