"""Asks the router who is there and whether the deployment can serve."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import grpc

from common.cluster_access import ClusterAccess, connect
from common.errors import WorkerLost, WorkerUnavailable
from common.pb import serving_pb2 as pb
from common.pb import serving_pb2_grpc
from common.rpc import typed_errors

CALL_TIMEOUT_S = 5.0
# CANCELLED: it stopped while it was asked
AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


async def cluster_status(control_address: str, access: ClusterAccess, timeout_s: float) -> pb.ClusterStatus:
    """Raises: WorkerUnavailable when no router answers there."""
    async with connect(control_address, access) as channel:
        registry: Any = serving_pb2_grpc.RegistryStub(channel)
        try:
            with typed_errors(f"the router at {control_address}"):
                status: pb.ClusterStatus = await registry.GetClusterStatus(pb.ClusterStatusRequest(), timeout=timeout_s)
                return status
        except WorkerUnavailable as error:
            raise WorkerUnavailable(f"no router answers at {control_address}") from error


async def drain_worker(control_address: str, access: ClusterAccess, worker_id: str, timeout_s: float) -> None:
    """Returns once the router has taken note. timeout_s 0: the worker's own.

    Raises: InvalidRequest if there is no such worker, WorkerUnavailable.
    """
    async with connect(control_address, access) as channel:
        registry: Any = serving_pb2_grpc.RegistryStub(channel)
        with typed_errors(f"the router at {control_address}"):
            request = pb.DrainWorkerRequest(worker_id=worker_id, timeout_s=timeout_s)
            await registry.DrainWorker(request, timeout=CALL_TIMEOUT_S)


async def scale_pool(control_address: str, access: ClusterAccess, wish: pb.ScalePoolRequest) -> None:
    """Returns once the supervisor has begun to add or to drain workers.

    Raises: InvalidRequest when nothing could be served then, WorkerUnavailable when no supervisor is there.
    """
    async with connect(control_address, access) as channel:
        registry: Any = serving_pb2_grpc.RegistryStub(channel)
        try:
            with typed_errors(f"the router at {control_address}"):
                await registry.ScalePool(wish, timeout=2 * CALL_TIMEOUT_S)  # two calls, one behind the other
        except WorkerLost as error:
            raise WorkerUnavailable(f"no router answers at {control_address}") from error


async def follow_status(
    control_address: str, access: ClusterAccess, every_s: float = 0.2
) -> AsyncGenerator[pb.ClusterStatus]:
    """The status again and again, for ever; silent while the router is away."""
    async with connect(control_address, access) as channel:
        registry: Any = serving_pb2_grpc.RegistryStub(channel)
        while True:
            try:
                yield await registry.GetClusterStatus(pb.ClusterStatusRequest(), timeout=2.0)
            except grpc.aio.AioRpcError as error:
                if error.code() not in AWAY:
                    raise
            await asyncio.sleep(every_s)
