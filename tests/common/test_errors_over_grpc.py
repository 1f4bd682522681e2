"""Every error keeps its type, message and parameter from one process to another."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest

from common.errors import ConfigError, ServingError, WorkerLost, error_types
from common.pb import serving_pb2 as pb
from common.pb import serving_pb2_grpc as pb_grpc
from common.rpc import answering, bind_port, new_channel, new_server, typed_errors


class Raising(pb_grpc.InferenceServicer):
    def __init__(self) -> None:
        self.error: ServingError = ServingError("unset")

    async def ListModels(
        self, request: pb.ListModelsRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> pb.ListModelsResponse:
        async with answering(context):
            raise self.error


@pytest.fixture
async def raising() -> AsyncIterator[tuple[Raising, str]]:
    servicer, server = Raising(), new_server()
    pb_grpc.add_InferenceServicer_to_server(servicer, server)
    address = bind_port(server, "127.0.0.1", 0)
    await server.start()
    yield servicer, address
    await server.stop(None)


async def test_every_type_survives_the_wire(raising: tuple[Raising, str]) -> None:
    servicer, address = raising
    async with new_channel(address) as channel:
        for name, kind in error_types().items():
            servicer.error = kind(f"a message of {name}", param="max_tokens")
            with pytest.raises(ServingError) as raised, typed_errors("peer"):
                await pb_grpc.InferenceStub(channel).ListModels(pb.ListModelsRequest())
            assert type(raised.value) is kind
            assert raised.value.message == f"a message of {name}"
            assert raised.value.param == "max_tokens"


async def test_a_dead_peer_is_a_lost_worker() -> None:
    async with new_channel("127.0.0.1:1") as channel:
        with pytest.raises(WorkerLost, match="prefill-7"), typed_errors("prefill-7"):
            await pb_grpc.InferenceStub(channel).ListModels(pb.ListModelsRequest(), timeout=10)


async def test_a_port_in_use_is_a_config_error(raising: tuple[Raising, str]) -> None:
    second = new_server()
    with pytest.raises(ConfigError, match="in use"):
        bind_port(second, "127.0.0.1", int(raising[1].rpartition(":")[2]))
    await second.stop(None)


def test_every_error_has_an_http_and_a_grpc_status() -> None:
    for kind in error_types().values():
        assert 400 <= kind.http_status < 600
        assert kind.grpc_status in grpc.StatusCode.__members__
