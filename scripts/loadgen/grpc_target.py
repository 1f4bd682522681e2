"""Load over gRPC: pdserve's own Inference service, which tells exactly which tokens each message carries."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from typing import Any, cast

import grpc

from common.pb import serving_pb2 as pb
from common.pb.serving_pb2_grpc import InferenceStub
from common.rpc import ERROR_KEY, new_channel
from loadgen.record import Delta, RequestFailed, ServerTimings, Unreachable
from loadgen.workload import PlannedRequest

CONNECT_TIMEOUT_S = 10.0


class GrpcTarget:
    def __init__(
        self,
        address: str,
        model: str | None = None,
        api_key: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        """credentials: for TLS."""
        self.label = f"grpc://{address}"
        self._model = model or ""  # empty: the served one
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._channel = new_channel(address, credentials)
        self._stub: Any = InferenceStub(self._channel)

    async def connect(self) -> None:
        try:
            await self._stub.ListModels(pb.ListModelsRequest(), timeout=CONNECT_TIMEOUT_S, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise Unreachable(f"no server at {self.label}: {error.code().name} {error.details()}") from error

    async def stream(self, request: PlannedRequest) -> AsyncGenerator[Delta, None]:
        has_ended = False
        call = self._stub.Generate(self._message(request), metadata=self._metadata)
        try:
            async for message in call:
                has_ended = has_ended or bool(message.finish_reason)
                usage = message.usage if message.HasField("usage") else None
                yield Delta(
                    num_tokens=len(message.token_ids),
                    is_end=bool(message.finish_reason),
                    input_tokens=usage.prompt_tokens if usage else None,
                    output_tokens=usage.completion_tokens if usage else None,
                    cached_tokens=usage.cached_tokens if usage else None,
                    timings=_timings(message.timings) if message.HasField("timings") else None,
                )
        except grpc.aio.AioRpcError as error:
            raise _failure(error) from error
        finally:
            call.cancel()  # does nothing to a call that has ended
        if not has_ended:
            raise RequestFailed("stream ended early", "no finish reason before the call ended")

    async def close(self) -> None:
        await self._channel.close(grace=None)

    def _message(self, request: PlannedRequest) -> pb.GenerateRequest:
        sampling = pb.SamplingParams(max_tokens=request.output_tokens, temperature=0, ignore_eos=True)
        if isinstance(request.prompt, str):
            return pb.GenerateRequest(model=self._model, prompt=request.prompt, sampling=sampling)
        token_ids = pb.TokenIds(ids=request.prompt)
        return pb.GenerateRequest(model=self._model, prompt_token_ids=token_ids, sampling=sampling)


def _timings(timings: pb.Timings) -> ServerTimings:
    return ServerTimings(
        stages={stage.name: stage.seconds for stage in timings.stages},
        prefill_worker=timings.prefill_worker,
        decode_worker=timings.decode_worker,
        attempts=timings.attempts,
    )


def _failure(error: grpc.aio.AioRpcError) -> RequestFailed:
    metadata = dict(cast("Iterable[tuple[str, str]]", error.trailing_metadata() or ()))
    return RequestFailed(f"grpc {error.code().name} {metadata.get(ERROR_KEY, '')}".rstrip(), error.details() or "")
