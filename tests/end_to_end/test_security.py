"""What a stranger meets at each port of a whole system, and the whole system over mutual TLS."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from common.cluster_access import ClusterAccess, connect
from common.config import ServeConfig
from common.errors import ConfigError, UnprovenCaller
from common.pb import kv_transfer_pb2 as kv_pb
from common.pb import serving_pb2 as pb
from common.pb import serving_pb2_grpc as pb_grpc
from common.pb.kv_transfer_pb2_grpc import KVTransferStub
from common.rpc import new_channel, typed_errors
from decode_worker.server import DecodeServer
from prefill_worker.server import PrefillServer
from router.server import RouterServer
from tests.end_to_end.local_cluster import LocalCluster, local_cluster
from tests.kv_transfer.certificates import Authority

SECRET = b"0123456789abcdef0123456789abcdef"


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(SECRET)
    return path


@pytest.fixture
async def cluster(tiny_model: Path, secret_file: Path) -> AsyncIterator[LocalCluster]:
    async with local_cluster(tiny_model, sections={"security": {"secret_file": str(secret_file)}}) as cluster:
        yield cluster


async def unless_refused(message: Any) -> AsyncIterator[Any]:
    """Sent a moment later: where the first write meets the end of its call, grpc.aio forgets why the call ended."""
    await asyncio.sleep(0.5)
    yield message


def calls(cluster: LocalCluster, of: Any) -> dict[str, Any]:
    """Every method of every port between components, called over the channel that `of(address)` gives."""
    router, decode, prefill = cluster.router.control_address, cluster.decode[0].address, cluster.prefill[0].address
    registry, decoding, prefilling = (
        pb_grpc.RegistryStub(of(router)),
        pb_grpc.DecodeStub(of(decode)),
        pb_grpc.PrefillStub(of(prefill)),
    )
    worker = pb.WorkerHello(worker_id="decode-9", role=pb.ROLE_DECODE, incarnation="x", model="tiny")
    hello = pb.WorkerReport(hello=worker)
    link_hello = kv_pb.LinkRequest(hello=kv_pb.LinkHello())
    return {
        "Register": registry.Register(unless_refused(hello), timeout=10).read(),
        "GetClusterStatus": registry.GetClusterStatus(pb.ClusterStatusRequest(), timeout=10),
        "Generate": decoding.Generate(pb.DecodeRequest(token_ids=[1, 2], compute_prompt=True), timeout=10).read(),
        "CheckPair": decoding.CheckPair(pb.PairCheckRequest(token_ids=[1, 2]), timeout=10).read(),
        "decode GetStatus": decoding.GetStatus(pb.WorkerStatusRequest(), timeout=10),
        "Run": prefilling.Run(pb.PrefillRequest(token_ids=[1, 2]), timeout=10).read(),
        "Link": KVTransferStub(of(decode)).Link(unless_refused(link_hello), timeout=10).read(),
        "prefill GetStatus": prefilling.GetStatus(pb.WorkerStatusRequest(), timeout=10),
    }


@pytest.mark.parametrize("secret", [b"", b"the secret of another cluster"])
async def test_a_stranger_can_call_no_method_of_any_component(cluster: LocalCluster, secret: bytes) -> None:
    async with ChannelsOf(secret) as channels:
        for name, call in calls(cluster, channels).items():
            with pytest.raises(UnprovenCaller), typed_errors(name):
                await call
    assert [worker.hello.worker_id for worker in (await cluster.cluster_status()).workers] == ["decode-0", "prefill-0"]
    assert (await cluster.complete("still", max_tokens=2))["usage"]["completion_tokens"] == 2


class ChannelsOf:
    """Channels to anywhere, closed at the end."""

    def __init__(self, secret: bytes) -> None:
        self._access = ClusterAccess(secret)
        self._open: list[grpc.aio.Channel] = []

    def __call__(self, address: str) -> grpc.aio.Channel:
        self._open.append(connect(address, self._access))
        return self._open[-1]

    async def __aenter__(self) -> ChannelsOf:
        return self

    async def __aexit__(self, *_: object) -> None:
        for channel in self._open:
            await channel.close()


async def test_a_worker_of_another_secret_does_not_join(cluster: LocalCluster, tmp_path: Path, caplog: Any) -> None:
    other = tmp_path / "other"
    other.write_text("the secret of another cluster")
    security = cluster.config.security.model_copy(update={"secret_file": other})
    config = cluster.config.model_copy(update={"security": security})
    worker = await PrefillServer.start(config, "prefill-9", [cluster.router.control_address])
    try:
        await cluster.complete("Hi", max_tokens=2)
        assert len((await cluster.cluster_status()).workers) == 2
    finally:
        await worker.stop()
    assert "not registered at" in caplog.text
    assert "does not prove that its caller knows this cluster's secret" in caplog.text


# ---------------------------------------------------------------- beyond loopback


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::", "example.com"])
async def test_a_control_port_that_others_could_reach_needs_a_secret(tiny_model: Path, host: str) -> None:
    with pytest.raises(ConfigError, match=r"router\.control_host is .*security\.secret_file"):
        async with local_cluster(tiny_model, prefill=0, decode=0, sections={"router": router(control_host=host)}):
            pass


def router(**changed: object) -> dict[str, object]:
    return {"http_port": 0, "grpc_port": 0, "control_port": 0, "metrics_port": 0, **changed}


async def test_beyond_loopback_the_public_port_has_no_metrics_and_the_control_host_has(tiny_model: Path) -> None:
    sections = {"router": router(host="0.0.0.0")}
    async with local_cluster(tiny_model, prefill=0, decode=0, colocated=1, sections=sections) as cluster:
        url = cluster.router.http_url.replace("0.0.0.0", "127.0.0.1")
        async with httpx.AsyncClient() as http:
            assert (await http.get(f"{url}/health")).status_code == 200
            assert "requests_total" in (await http.get(cluster.router.metrics_url)).text
            for path in ("metrics", "metrics/targets", "dashboard", "dashboard/state", "dashboard/trace"):
                assert (await http.get(f"{url}/{path}")).status_code == 404, path
                assert (await http.get(cluster.router.metrics_url.replace("metrics", path))).status_code == 200, path
            assert (await http.get(cluster.router.metrics_url.replace("metrics", "health"))).status_code == 404
        assert cluster.router.metrics_url.startswith("http://127.0.0.1:")
        assert cluster.router.control_address.startswith("127.0.0.1:")


@pytest.mark.parametrize("method", ["Registry/GetClusterStatus", "Registry/Register", "Decode/Generate", "Prefill/Run"])
async def test_the_public_grpc_port_knows_no_method_of_the_cluster(cluster: LocalCluster, method: str) -> None:
    async with connect(cluster.router.grpc_address, ClusterAccess(SECRET)) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(f"/pdserve.v1.{method}")(b"", timeout=10)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


# ---------------------------------------------------------------- TLS everywhere


@pytest.mark.parametrize("transport", ["auto", "tcp", "grpc"])
async def test_everything_works_over_tls(tiny_model: Path, secret_file: Path, tmp_path: Path, transport: str) -> None:
    files = Authority(tmp_path, "authority").certify("component")
    pair = {"certificate_file": str(files.cert), "key_file": str(files.key)}
    security = {"secret_file": str(secret_file), "tls": pair, "cluster_tls": {**pair, "ca_file": str(files.ca)}}
    sections = {"security": security, "transfer": {"transport": transport}}
    trusting = ssl.create_default_context(cafile=files.ca)
    async with local_cluster(tiny_model, sections=sections) as cluster:
        async with httpx.AsyncClient(verify=trusting) as http:
            body = {"model": "tiny", "prompt": "Hello", "max_tokens": 4, "temperature": 0}
            response = await http.post(f"{cluster.router.http_url}/v1/completions", json=body)
        assert response.json()["usage"]["completion_tokens"] == 4
        assert (await cluster.decode_status()).counters["received_prefills"] >= 1
        stranger = Authority(tmp_path, "other").certify("stranger")
        for address in (cluster.router.control_address, cluster.decode[0].address, cluster.prefill[0].address):
            await require_closed(address, grpc.ssl_channel_credentials(files.ca.read_bytes()))
            credentials = (files.ca.read_bytes(), stranger.key.read_bytes(), stranger.cert.read_bytes())
            await require_closed(address, grpc.ssl_channel_credentials(*credentials))
            await require_closed(address, None)


async def require_closed(address: str, credentials: grpc.ChannelCredentials | None) -> None:
    async with new_channel(address, credentials) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=10)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_wrong_certificate_ends_each_component_before_it_loads_a_model() -> None:
    section = {"certificate_file": "/no/such.crt", "key_file": "/no/such.key"}
    tree = {"model": {"source": "/no/such/model"}, "security": {"cluster_tls": {**section, "ca_file": "/no/such.ca"}}}
    config = ServeConfig.model_validate(tree)
    for start in (
        partial(RouterServer.start, config),
        partial(PrefillServer.start, config, "prefill-0", "127.0.0.1:9"),
        partial(DecodeServer.start, config, "decode-0", "127.0.0.1:9"),
    ):
        with pytest.raises(ConfigError, match=r"security\.cluster_tls: cannot read /no/such\.key"):
            await start()
