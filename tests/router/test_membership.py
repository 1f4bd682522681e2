"""A worker's stream at a real registry: what it says last tells whether it was drained."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest

from common.cluster_access import NO_SECRET, bind_cluster_port, connect, new_cluster_server
from common.errors import InvalidRequest
from common.membership import Membership
from common.pb import serving_pb2 as pb
from common.pb import serving_pb2_grpc as pb_grpc
from common.rpc import typed_errors
from router.prefix_index import PrefixIndex
from router.registry import Registry, RegistryService
from router.supervision import Supervision
from router.worker import Worker


class Reports:
    """Of a worker that has nothing to tell but whether it drains."""

    is_draining = False

    @contextmanager
    def listening(self) -> Iterator[Callable[[], Awaitable[pb.WorkerLoad]]]:
        async def report() -> pb.WorkerLoad:
            return pb.WorkerLoad(is_draining=self.is_draining)

        yield report


@asynccontextmanager
async def registry_at() -> AsyncIterator[tuple[Registry, str]]:
    registry = Registry("tiny", PrefixIndex(10), must_check_pairs=False)
    server = new_cluster_server(NO_SECRET)
    service = RegistryService(registry, pb.ClusterStatus, Supervision(), NO_SECRET)
    pb_grpc.add_RegistryServicer_to_server(service, server)
    address = bind_cluster_port(server, "127.0.0.1", 0, NO_SECRET)
    await server.start()
    try:
        yield registry, address
    finally:
        await server.stop(None)


def hello(name: str) -> pb.WorkerHello:
    return pb.WorkerHello(
        worker_id=name, role=pb.ROLE_DECODE, incarnation="i", model="tiny", address="127.0.0.1:1", max_model_len=16
    )


@pytest.mark.parametrize("is_draining", [True, False])
async def test_a_worker_that_ends_says_whether_it_was_drained_whatever_its_last_heartbeat_said(
    is_draining: bool,
) -> None:
    left: list[bool] = []
    async with registry_at() as (registry, address):
        has_left = asyncio.Event()

        def note(worker: Worker) -> None:
            left.append(worker.is_draining)
            has_left.set()

        registry.on_left = note
        reports = Reports()
        membership = Membership(address, hello("decode-0"), reports, lambda timeout_s: None, NO_SECRET)
        async with asyncio.timeout(10):
            while not membership.is_registered:
                await asyncio.sleep(0.01)
        reports.is_draining = is_draining
        await membership.close()
        await asyncio.wait_for(has_left.wait(), 10)
        await membership.close()
    assert left == [is_draining]


@pytest.mark.parametrize("name", ["evil\x1b[31m", "two\nlines", "a b", "x" * 65, "{}"])
async def test_a_name_that_would_disturb_a_terminal_or_a_log_is_refused(name: str) -> None:
    async with registry_at() as (registry, address), connect(address, NO_SECRET) as channel:

        async def reports() -> AsyncIterator[pb.WorkerReport]:
            yield pb.WorkerReport(hello=hello(name))

        replies = pb_grpc.RegistryStub(channel).Register(reports(), timeout=10)
        with pytest.raises(InvalidRequest, match="letters, digits"), typed_errors("the router"):
            await replies.read()
        assert registry.workers == []
