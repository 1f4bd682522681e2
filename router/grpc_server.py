"""The gRPC server that clients reach: nothing gets to a servicer that has no key, is too large, or is no message."""

from __future__ import annotations

import grpc

from common.rpc import new_server
from router.frontend import MAX_REQUEST_BYTES
from router.gate import Gate
from router.grpc_gate import GateInterceptor
from router.grpc_parsing import ParsingInterceptor


def new_public_server(gate: Gate, *, shares_port: bool) -> grpc.aio.Server:
    """shares_port: with other router processes of this deployment; the kernel deals out the connections."""
    interceptors = [GateInterceptor(gate), ParsingInterceptor()]
    return new_server(interceptors, MAX_REQUEST_BYTES, shares_port=shares_port)
