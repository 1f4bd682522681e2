"""Every way a request can fail, named by what the caller does next.

One type decides the HTTP status, the gRPC status and the OpenAI error body, so the three never disagree.
"""

from __future__ import annotations

from typing import ClassVar


class ServingError(Exception):
    """Base of every error that reaches a client or crosses a process boundary."""

    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[str] = "INTERNAL"  # a name of grpc.StatusCode
    openai_type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None  # OpenAI's machine-readable `code`
    retry_after_s: float | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param  # the request field at fault, if one is


class InvalidRequest(ServingError):
    """The client must change the request."""

    http_status = 400
    grpc_status = "INVALID_ARGUMENT"
    openai_type = "invalid_request_error"
    code = "invalid_request"


class PromptTooLong(InvalidRequest):
    code = "context_length_exceeded"


class InvalidSampling(InvalidRequest):
    code = "invalid_sampling"


class UnknownModel(InvalidRequest):
    http_status = 404
    grpc_status = "NOT_FOUND"
    code = "model_not_found"


class Unauthorized(ServingError):
    http_status = 401
    grpc_status = "UNAUTHENTICATED"
    openai_type = "authentication_error"
    code = "invalid_api_key"


class Overloaded(ServingError):
    """Nothing is broken; retry later."""

    http_status = 429
    grpc_status = "RESOURCE_EXHAUSTED"
    openai_type = "overloaded_error"
    code = "overloaded"
    retry_after_s = 1.0


class QueueFull(Overloaded):
    code = "queue_full"


class WouldMissDeadline(Overloaded):
    """The first token would come too late, so nothing was spent on it. `retry_after_s` is set by whoever raises it."""

    code = "would_miss_deadline"


class RateLimited(Overloaded):
    """This client has had its share; others are served. `retry_after_s` is set by whoever raises it."""

    openai_type = "rate_limit_error"
    code = "rate_limit_exceeded"


class NoFreeBlocks(Overloaded):
    code = "no_free_blocks"


class WorkerUnavailable(ServingError):
    """A worker cannot serve; another one may."""

    http_status = 503
    grpc_status = "UNAVAILABLE"
    openai_type = "service_unavailable_error"
    code = "worker_unavailable"
    retry_after_s = 1.0


class WorkerLost(WorkerUnavailable):
    code = "worker_lost"


class WorkerDraining(WorkerUnavailable):
    code = "worker_draining"


class TransferError(ServingError):
    """The KV did not arrive whole; the request starts again from QUEUED."""

    http_status = 503
    grpc_status = "ABORTED"
    openai_type = "service_unavailable_error"
    code = "transfer_failed"
    retry_after_s = 1.0


class TransferTimeout(TransferError):
    code = "transfer_timeout"


class PeerLost(TransferError):
    code = "peer_lost"


class CorruptPiece(TransferError):
    code = "corrupt_piece"


class TransferAborted(TransferError):
    """One side ended the transfer on purpose: the request was cancelled or replaced by a later attempt."""

    code = "transfer_aborted"


class IncompatiblePeer(ServingError):
    """Two workers can never exchange KV; an operator must fix the deployment."""

    grpc_status = "FAILED_PRECONDITION"
    code = "incompatible_peer"


class LayoutMismatch(IncompatiblePeer):
    code = "layout_mismatch"


class VersionMismatch(IncompatiblePeer):
    code = "version_mismatch"


class TlsMismatch(IncompatiblePeer):
    """One side encrypts KV and the other does not."""

    code = "tls_mismatch"


class WrongSecret(IncompatiblePeer):
    """One side does not know the cluster's secret. This and TlsMismatch are all that a stranger is ever told."""

    code = "wrong_secret"


class UnprovenCaller(IncompatiblePeer):
    """A call between components that does not prove the cluster's secret."""

    grpc_status = "UNAUTHENTICATED"
    code = "unproven_caller"


class DeadlineExceeded(ServingError):
    http_status = 504
    grpc_status = "DEADLINE_EXCEEDED"
    openai_type = "timeout_error"
    code = "deadline_exceeded"


class ConfigError(Exception):
    """The deployment is described wrongly: a bad key, a missing file. The message says what to change."""


class ModelError(ConfigError):
    """The model cannot be loaded: missing, corrupt or of an unsupported kind."""


def error_types() -> dict[str, type[ServingError]]:
    """Every ServingError of this module by class name: how an error is named when it crosses a process boundary."""
    return {name: kind for name, kind in globals().items() if isinstance(kind, type) and issubclass(kind, ServingError)}


def wire_name(error: ServingError) -> str:
    """The name of the nearest class that the other side knows too."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in error_types())
