"""gRPC conventions between pdserve processes: channel settings, and errors that keep their type over the wire."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NoReturn, cast

import grpc

from common.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    ServingError,
    WorkerLost,
    error_types,
    wire_name,
)

ERROR_KEY = "pdserve-error"  # trailing metadata: the class name in common/errors.py
PARAM_KEY = "pdserve-error-param"
RETRY_AFTER_KEY = "retry-after"  # whole seconds, as in HTTP
MAX_MESSAGE_BYTES = 64 * 1024 * 1024

# A dead or frozen peer is noticed within two seconds; see docs/architecture.md, "Liveness".
CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.http2.ping_timeout_ms", 1000),  # a frozen process still acknowledges TCP; its default is a minute
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_reconnect_backoff_ms", 250),  # a router that starts again has its workers back within a heartbeat
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.use_local_subchannel_pool", 1),
]
SERVER_OPTIONS: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", 1000),  # the router, too, must notice a frozen worker whose membership is its stream
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.http2.ping_timeout_ms", 1000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 300),
    ("grpc.http2.min_ping_interval_without_data_ms", 300),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]

_BY_STATUS: dict[grpc.StatusCode, type[ServingError]] = {
    grpc.StatusCode.UNAVAILABLE: WorkerLost,
    grpc.StatusCode.CANCELLED: WorkerLost,  # our own cancellation raises asyncio.CancelledError instead
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
}


def new_channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


def new_server(
    interceptors: Sequence[grpc.aio.ServerInterceptor[Any, Any]] = (),
    max_request_bytes: int = MAX_MESSAGE_BYTES,
    *,
    shares_port: bool = False,
) -> grpc.aio.Server:
    """shares_port: other processes may listen on the same port; otherwise that is an error."""
    options = [
        *SERVER_OPTIONS,
        ("grpc.max_receive_message_length", max_request_bytes),
        ("grpc.so_reuseport", int(shares_port)),
    ]
    return grpc.aio.server(interceptors=interceptors, options=options)


def bind_port(server: grpc.aio.Server, host: str, port: int) -> str:
    """Listen on host:port (0: any free one) and return the address. Raises: ConfigError if it is taken."""
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: it is in use or not allowed; choose another port"
        ) from error
    return f"{host}:{bound}"


@contextmanager
def typed_errors(peer: str) -> Iterator[None]:
    """Turn a failed call to `peer` into the ServingError that the peer raised, or the one that fits the status."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise to_serving_error(error, peer) from error


def to_serving_error(error: grpc.aio.AioRpcError, peer: str) -> ServingError:
    pairs = cast("Iterable[tuple[str, str]]", error.trailing_metadata() or ())
    metadata = dict(pairs)
    kind = error_types().get(metadata.get(ERROR_KEY, ""))
    if kind is not None:
        return kind(error.details() or "", param=metadata.get(PARAM_KEY))
    by_status = _BY_STATUS.get(error.code(), ServingError)
    return by_status(f"{peer}: {error.code().name} {error.details()}")


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: ServingError) -> NoReturn:
    """End a call with a typed error."""
    metadata = [(ERROR_KEY, wire_name(error))] + ([(PARAM_KEY, error.param)] if error.param else [])
    if error.retry_after_s is not None:
        metadata.append((RETRY_AFTER_KEY, str(math.ceil(error.retry_after_s))))
    await context.abort(grpc.StatusCode[error.grpc_status], error.message, tuple(metadata))
    raise AssertionError("context.abort returned")


@asynccontextmanager
async def answering(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """The body of a servicer method: a ServingError raised inside ends the call with its own status and type."""
    try:
        yield
    except ServingError as error:
        await abort(context, error)
