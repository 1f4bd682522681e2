"""`pdserve up` at each of its routers: it tells of its pools, and does what `pdserve scale` wishes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc

from cluster.plan import Plan
from cluster.pools import Pools
from cluster.registry_client import AWAY
from common.cluster_access import connect
from common.config import Role
from common.errors import InvalidRequest, ServingError, wire_name
from common.pb import serving_pb2 as pb
from common.pb import serving_pb2_grpc as pb_grpc
from common.worker_server import ROLES

REPORT_S = 0.25
RECONNECT_S = 0.25

Outcomes = asyncio.Queue[pb.ScaleOutcome]


async def steer(plan: Plan, pools: Pools) -> None:
    """For ever, through every restart of a router."""
    async with asyncio.TaskGroup() as group:
        for address in plan.control_addresses:
            group.create_task(_steer_at(address, plan, pools), name=f"steering at {address}")


async def _steer_at(address: str, plan: Plan, pools: Pools) -> None:
    async with connect(address, plan.config.security.cluster_access()) as channel:
        registry = pb_grpc.RegistryStub(channel)
        while True:
            outcomes: Outcomes = asyncio.Queue()
            try:
                async for order in registry.Supervise(_reports(pools, outcomes), wait_for_ready=True):
                    outcomes.put_nowait(_obey(pools, order))
            except grpc.aio.AioRpcError as error:
                if error.code() not in AWAY:
                    raise
            await asyncio.sleep(RECONNECT_S)


async def _reports(pools: Pools, outcomes: Outcomes) -> AsyncIterator[pb.SupervisorReport]:
    """An outcome at once, together with what it has changed."""
    while True:
        yield pb.SupervisorReport(pools=pools.statuses())
        try:
            outcome = await asyncio.wait_for(outcomes.get(), REPORT_S)
        except TimeoutError:
            continue
        yield pb.SupervisorReport(pools=pools.statuses(), outcome=outcome)


def _obey(pools: Pools, order: pb.ScaleOrder) -> pb.ScaleOutcome:
    try:
        pools.scale(_role(order.role), order.replicas)
    except ServingError as error:
        return pb.ScaleOutcome(order_id=order.order_id, error_type=wire_name(error), error=error.message)
    return pb.ScaleOutcome(order_id=order.order_id)


def _role(number: int) -> Role:
    for role, its_number in ROLES.items():
        if its_number == number:
            return role
    raise InvalidRequest(f"there is no pool with the number {number}", param="role")
