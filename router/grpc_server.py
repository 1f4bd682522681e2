"""The gRPC server that clients reach: nothing gets to a servicer that has no key, is too large, or is no message."""

from __future__ import annotations

import grpc

from common.rpc import new_server
from router.frontend import MAX_REQUEST_BYTES
from router.gate import Gate
from router.grpc_gate import GateInterceptor
from router.grpc_parsing import ParsingInterceptor


def new_public_server(gate: Gate) -> grpc.aio.Server:
    return new_server([GateInterceptor(gate), ParsingInterceptor()], MAX_REQUEST_BYTES)
