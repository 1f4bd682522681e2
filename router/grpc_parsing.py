"""A message that is no message is the client's mistake, and is answered as one. grpc itself calls it UNKNOWN, with a
traceback in the log for each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from common.errors import InvalidRequest
from common.rpc import abort
from router.grpc_gate import INFERENCE, Context, Handler


class ParsingInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs alone
    """Parses Inference's messages, of which every call has one. The gate comes first, or strangers would be parsed."""

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]], details: grpc.HandlerCallDetails
    ) -> Handler:
        handler = await continuation(details)
        if not details.method.startswith(INFERENCE) or handler is None or handler.request_deserializer is None:
            return handler
        serve: Any = handler.unary_stream or handler.unary_unary  # the stubs know synchronous servers' alone
        answer = _parsed(handler.request_deserializer, serve)
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(answer, None, handler.response_serializer)
        return grpc.unary_unary_rpc_method_handler(answer, None, handler.response_serializer)


def _parsed(parse: Callable[[bytes], Any], serve: Callable[[Any, Context], Any]) -> Callable[[bytes, Context], Any]:
    """serve: a coroutine function, as all of Inference are; a streaming one writes its answers."""

    async def parse_and_serve(data: bytes, context: Context) -> Any:
        try:
            message = parse(data)
        except DecodeError:
            await abort(context, InvalidRequest("the message cannot be parsed: damaged, of another type, or not UTF-8"))
        return await serve(message, context)

    return parse_and_serve
