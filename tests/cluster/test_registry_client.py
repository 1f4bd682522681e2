"""`pdserve up` follows its router through everything that may happen to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc
import pytest

from cluster.registry_client import follow_status
from common.cluster_access import NO_SECRET
from common.pb import serving_pb2 as pb
from common.pb.serving_pb2_grpc import RegistryServicer, add_RegistryServicer_to_server
from common.rpc import bind_port, new_server


class Registry(RegistryServicer):
    """Ends its first calls with these statuses, then answers."""

    def __init__(self) -> None:
        self.address = ""
        self.statuses: list[grpc.StatusCode] = []

    async def GetClusterStatus(self, request, context):
        if self.statuses:
            await context.abort(self.statuses.pop(0), "as the test wants it")
        return pb.ClusterStatus(model="tiny")


@pytest.fixture
async def registry() -> AsyncIterator[Registry]:
    served, server = Registry(), new_server()
    add_RegistryServicer_to_server(served, server)
    served.address = bind_port(server, "127.0.0.1", 0)
    await server.start()
    yield served
    await server.stop(grace=0)


async def test_a_router_that_stops_while_it_is_asked_is_only_away(registry: Registry) -> None:
    """Its process cancels the calls that it has not answered; `pdserve up` must outlive that."""
    registry.statuses = [grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE]
    async with aclosing(follow_status(registry.address, NO_SECRET, every_s=0.01)) as statuses:
        assert (await asyncio.wait_for(anext(statuses), 10)).model == "tiny"


async def test_a_router_that_knows_no_registry_is_an_error(registry: Registry) -> None:
    registry.statuses = [grpc.StatusCode.UNIMPLEMENTED]
    async with aclosing(follow_status(registry.address, NO_SECRET, every_s=0.01)) as statuses:
        with pytest.raises(grpc.aio.AioRpcError, match="as the test wants it"):
            await asyncio.wait_for(anext(statuses), 10)
