"""Every call of Inference needs a key, which is looked at before its message is parsed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc

from common.errors import ServingError
from common.rpc import refusing
from router.gate import Gate
from router.tenant import Tenant

INFERENCE = "/pdserve.v1.Inference/"  # health and reflection are open
AUTHORIZATION = "authorization"

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context = grpc.aio.ServicerContext[Any, Any]


class GateInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs alone
    """Turns strangers away. Who is let in, the servicer asks again: nothing travels between the two."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]], details: grpc.HandlerCallDetails
    ) -> Handler:
        if details.method.startswith(INFERENCE):
            try:
                tenant = tenant_of(self._gate, details.invocation_metadata)
                if details.method == INFERENCE + "Generate":
                    self._gate.require_room(tenant)
            except ServingError as error:
                return refusing(error)
        return await continuation(details)


def tenant_of(gate: Gate, metadata: Any) -> Tenant:
    """metadata: a call's, as grpc gives it. Raises: Unauthorized."""
    values = [value for key, value in metadata or () if key == AUTHORIZATION]
    return gate.tenant(values[0] if values else None)
