"""Components prove the cluster's secret with each call, and a stranger's call is refused before it is read."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import given
from hypothesis import strategies as st

from common.cluster_access import ClusterAccess, bind_cluster_port, connect, new_cluster_server
from common.errors import UnprovenCaller
from common.pb import serving_pb2 as pb
from common.pb import serving_pb2_grpc as pb_grpc
from common.proof import PROOF_KEY, PROOF_LIFE_S, ProofChecker, new_proof
from common.rpc import new_channel, to_serving_error
from common.standard_services import add_standard_services

SECRET, OTHER = b"the secret of this cluster", b"the secret of another one"
GENERATE, RUN = "/pdserve.v1.Decode/Generate", "/pdserve.v1.Prefill/Run"


class Clock:
    now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def checker(clock: Clock) -> ProofChecker:
    return ProofChecker(SECRET, clock)


def proof(method: str = GENERATE, secret: bytes = SECRET, at_s: float = Clock.now_s) -> str:
    return new_proof(secret, method, at_s)


# ---------------------------------------------------------------- one proof


def test_whoever_knows_the_secret_is_let_in(checker: ProofChecker) -> None:
    for _ in range(3):
        checker.require(GENERATE, proof())


def test_a_proof_is_good_once(checker: ProofChecker, clock: Clock) -> None:
    once = proof()
    checker.require(GENERATE, once)
    for _ in range(2):
        with pytest.raises(UnprovenCaller, match="used before"):
            checker.require(GENERATE, once)
        clock.now_s += PROOF_LIFE_S


def test_a_proof_is_good_for_its_method_alone(checker: ProofChecker) -> None:
    with pytest.raises(UnprovenCaller, match="does not prove"):
        checker.require(GENERATE, proof(RUN))


@pytest.mark.parametrize(("skew_s", "words"), [(31, "31 s ahead"), (-31, "31 s behind"), (-86400, "86400 s behind")])
def test_a_proof_of_another_time_is_refused_and_says_by_how_much(
    checker: ProofChecker, skew_s: float, words: str
) -> None:
    with pytest.raises(UnprovenCaller, match=words):
        checker.require(GENERATE, proof(at_s=Clock.now_s + skew_s))


@pytest.mark.parametrize("skew_s", [-29, 29])
def test_clocks_may_differ_a_little_and_a_proof_is_still_good_once(
    checker: ProofChecker, clock: Clock, skew_s: float
) -> None:
    early_or_late = proof(at_s=Clock.now_s + skew_s)
    checker.require(GENERATE, early_or_late)
    while clock.now_s < Clock.now_s + skew_s + PROOF_LIFE_S:  # for as long as it lives
        clock.now_s += 1
        with pytest.raises(UnprovenCaller):
            checker.require(GENERATE, early_or_late)


def test_proofs_that_have_died_are_forgotten(checker: ProofChecker, clock: Clock) -> None:
    for _ in range(1000):
        checker.require(GENERATE, proof(at_s=clock.now_s))
        clock.now_s += 1
    assert len(checker._used) <= 2 * PROOF_LIFE_S + 2


@given(st.text() | st.binary().map(lambda raw: raw.decode("latin-1")) | st.from_regex(r"\d+\.[0-9a-f]*\.[0-9a-f]*"))
def test_nothing_made_up_is_a_proof(made_up: str) -> None:
    with pytest.raises(UnprovenCaller, match="does not prove"):
        ProofChecker(SECRET).require(GENERATE, made_up)


@given(st.integers(min_value=0), st.integers(0, 255))
def test_no_changed_byte_is_overlooked(position: int, byte: int) -> None:
    good = proof()
    position %= len(good)
    changed = good[:position] + chr(byte) + good[position + 1 :]
    checker = ProofChecker(SECRET, Clock())
    if changed == good:
        checker.require(GENERATE, changed)
    else:
        with pytest.raises(UnprovenCaller):
            checker.require(GENERATE, changed)


# ---------------------------------------------------------------- over gRPC


class Registry(pb_grpc.RegistryServicer):
    num_messages = 0

    async def Register(self, requests: AsyncIterator[pb.WorkerReport], _: object) -> AsyncIterator[pb.RegisterReply]:
        async for _ in requests:
            self.num_messages += 1
            yield pb.RegisterReply(router_incarnation="here")

    async def GetClusterStatus(self, request: pb.ClusterStatusRequest, _: object) -> pb.ClusterStatus:
        self.num_messages += 1
        return pb.ClusterStatus(model="tiny")


@pytest.fixture
def registry() -> Registry:
    return Registry()


@pytest.fixture
async def address(registry: Registry) -> AsyncIterator[str]:
    access = ClusterAccess(SECRET)
    server = new_cluster_server(access)
    pb_grpc.add_RegistryServicer_to_server(registry, server)
    await add_standard_services(server, ["pdserve.v1.Registry"])
    address = bind_cluster_port(server, "127.0.0.1", 0, access)
    await server.start()
    yield address
    await server.stop(None)


async def test_every_kind_of_call_carries_a_proof_and_its_own_metadata(registry: Registry, address: str) -> None:
    async with connect(address, ClusterAccess(SECRET)) as channel:
        stub: Any = pb_grpc.RegistryStub(channel)
        for _ in range(2):
            status = await stub.GetClusterStatus(pb.ClusterStatusRequest(), timeout=10, metadata=(("a", "b"),))
            assert status.model == "tiny"
        replies = [reply async for reply in stub.Register(iter([pb.WorkerReport()] * 3), timeout=10)]
    assert len(replies) == 3
    assert registry.num_messages == 5


@pytest.mark.parametrize("secret", [b"", OTHER])
async def test_a_stranger_is_unauthenticated_and_nothing_of_its_message_is_read(
    registry: Registry, address: str, secret: bytes
) -> None:
    async with connect(address, ClusterAccess(secret)) as channel:
        stub: Any = pb_grpc.RegistryStub(channel)
        for call in (
            stub.GetClusterStatus(pb.ClusterStatusRequest(), timeout=10),
            stub.Register(iter([pb.WorkerReport()]), timeout=10).read(),
            channel.unary_unary("/pdserve.v1.Registry/GetClusterStatus")(b"\xff" * 2**22, timeout=10),
            channel.unary_unary("/pdserve.v1.Registry/Nothing")(b"", timeout=10),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert isinstance(to_serving_error(caught.value, "router"), UnprovenCaller)
    assert registry.num_messages == 0


async def test_a_proof_that_was_overheard_is_of_no_use(registry: Registry, address: str) -> None:
    method = "/pdserve.v1.Registry/GetClusterStatus"
    overheard = ((PROOF_KEY, new_proof(SECRET, method, time.time())),)
    async with new_channel(address) as channel:
        stub: Any = pb_grpc.RegistryStub(channel)
        await stub.GetClusterStatus(pb.ClusterStatusRequest(), timeout=10, metadata=overheard)
        with pytest.raises(grpc.aio.AioRpcError, match="used before"):
            await stub.GetClusterStatus(pb.ClusterStatusRequest(), timeout=10, metadata=overheard)
    assert registry.num_messages == 1


async def test_a_health_probe_needs_no_secret(address: str) -> None:
    async with new_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service="pdserve.v1.Registry")
        answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=10)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
