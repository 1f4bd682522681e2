"""A message that is no message is the client's mistake, and is answered as one. grpc itself calls it UNKNOWN, with a
traceback in the log for each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from common.errors import InvalidRequest, Overloaded
from common.rpc import abort
from router.grpc_gate import INFERENCE, Context, Handler

MAX_MESSAGES_BYTES = 256 * 1024 * 1024


class ParsingInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs alone
    """Parses Inference's messages, of which every call has one. The gate comes first, or strangers would be parsed.

    As router/http_middleware.py does for bodies, it bounds what all messages hold together while they are served.
    """

    def __init__(self, max_total_bytes: int = MAX_MESSAGES_BYTES) -> None:
        self._max_total_bytes = max_total_bytes
        self._total_bytes = 0

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]], details: grpc.HandlerCallDetails
    ) -> Handler:
        handler = await continuation(details)
        if not details.method.startswith(INFERENCE) or handler is None or handler.request_deserializer is None:
            return handler
        serve: Any = handler.unary_stream or handler.unary_unary  # the stubs know synchronous servers' alone
        answer = self._parsed(handler.request_deserializer, serve)
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(answer, None, handler.response_serializer)
        return grpc.unary_unary_rpc_method_handler(answer, None, handler.response_serializer)

    def _parsed(
        self, parse: Callable[[bytes], Any], serve: Callable[[Any, Context], Any]
    ) -> Callable[[bytes, Context], Any]:
        """serve: a coroutine function, as all of Inference are; a streaming one writes its answers."""

        async def parse_and_serve(data: bytes, context: Context) -> Any:
            num_bytes = len(data)
            if self._total_bytes + num_bytes > self._max_total_bytes:
                await abort(context, Overloaded("too many large messages are being served; retry later"))
            self._total_bytes += num_bytes
            try:
                message = parse(data)
                del data
                return await serve(message, context)
            except DecodeError:
                problem = "the message cannot be parsed: damaged, of another type, or not UTF-8"
                await abort(context, InvalidRequest(problem))
            finally:
                self._total_bytes -= num_bytes

        return parse_and_serve
