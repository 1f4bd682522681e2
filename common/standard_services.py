"""What every pdserve gRPC server offers beside its own services: health checks and reflection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection


async def add_standard_services(server: grpc.aio.Server, service_names: Sequence[str]) -> Any:
    """Health (every service SERVING) and reflection, which grpcurl and load balancers expect."""
    checks = health.aio.HealthServicer()
    for name in service_names:
        await checks.set(name, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    reflection.enable_server_reflection([*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    return checks
