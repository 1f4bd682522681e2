"""Nothing listens beyond loopback unless it was told to: every listening socket of every process of a deployment."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from pathlib import Path

import httpx
import pytest

from common.config import load_config
from tests.cluster.pdserve_process import pdserve
from tests.cluster.sockets import family_of, listening


def beyond_loopback(sockets: dict[tuple[str, int], int]) -> list[tuple[str, int]]:
    return [name for name in sockets if not ipaddress.ip_address(name[0]).is_loopback]


def config_with(tiny_config: Path, folder: Path, lines: str) -> Path:
    path = folder / "serve.yaml"
    path.write_text(tiny_config.read_text() + lines)
    return path


def answers(url: str) -> bool:
    response = httpx.post(f"{url}/v1/completions", json={"model": "tiny", "prompt": "Hello"}, timeout=60)
    return response.status_code == 200


def router_ports(logs: Path) -> set[int]:
    router = load_config(logs / "serve.yaml").router
    return {router.http_port, router.grpc_port, router.control_port}


@pytest.mark.parametrize("transport", ["auto", "torch_dist"])
async def test_every_port_of_a_deployment_is_on_loopback(tiny_config: Path, tmp_path: Path, transport: str) -> None:
    config = config_with(tiny_config, tmp_path, f"transfer: {{transport: {transport}}}\n")
    async with pdserve("up", "--config", str(config), logs=tmp_path / "logs") as up:
        url = await up.url()
        assert answers(url)
        sockets = listening(family_of(up.process.pid))
        assert router_ports(tmp_path / "logs") <= {port for _, port in sockets}
        assert len(sockets) >= 5  # three of the router's, one of each worker's
        assert beyond_loopback(sockets) == []
        assert await up.stop() == 0


async def test_a_public_host_opens_the_two_apis_and_nothing_else(tiny_config: Path, tmp_path: Path) -> None:
    """To everybody means: the two ports on all addresses. The rest stays where it was."""
    config = config_with(tiny_config, tmp_path, "")
    config.write_text(config.read_text().replace("router: {", "router: {host: 0.0.0.0, "))
    async with pdserve("up", "--config", str(config), logs=tmp_path / "logs") as up:
        await up.url()
        router = load_config(tmp_path / "logs" / "serve.yaml").router
        sockets = listening(family_of(up.process.pid))
        # gRPC takes 0.0.0.0 for every address there is, IPv6 as well
        assert {port for _, port in beyond_loopback(sockets)} == {router.http_port, router.grpc_port}
        assert ("127.0.0.1", router.control_port) in sockets
        assert ("127.0.0.1", router.metrics_port) in sockets
        assert await up.stop() == 0


async def test_the_look_at_the_kernels_table_finds_a_socket_that_listens_to_everybody() -> None:
    with (
        socket.create_server(("0.0.0.0", 0)) as everybody,
        socket.create_server(("::1", 0), family=socket.AF_INET6) as own,
    ):
        process = await asyncio.create_subprocess_exec(
            "sleep", "60", pass_fds=[everybody.fileno(), own.fileno()], stdin=asyncio.subprocess.DEVNULL
        )
        sockets = listening([process.pid])
        process.kill()
        await process.wait()
        assert set(sockets) == {("0.0.0.0", everybody.getsockname()[1]), ("::1", own.getsockname()[1])}
        assert beyond_loopback(sockets) == [("0.0.0.0", everybody.getsockname()[1])]
