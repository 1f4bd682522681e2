"""Joining a running Ray cluster whose nodes advertise roles: three nodes, here on one machine."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from common.config import load_config
from common.errors import IncompatiblePeer
from tests.cluster.pdserve_process import all_pids, command_line, pdserve, run
from tests.cluster.sockets import family_of, listening
from tests.cluster.steady_load import load_on, more_answers
from tests.cluster.stranger import connect, decode_worker_of

RAY_SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
CLUSTER = """
    import sys
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "temp_dir": sys.argv[1]})
    for role in ("prefill", "decode"):
        cluster.add_node(num_cpus=1, resources={role: 1})
    cluster.wait_for_nodes()
    print("address", cluster.address, flush=True)
    ray.init(address=cluster.address, log_to_driver=False)
    for line in sys.stdin:
        for role in line.split():
            cluster.add_node(num_cpus=1, resources={role: 1})
        free = ray.available_resources()
        print("free", *(role for role in ("prefill", "decode") if free.get(role)), flush=True)
    ray.shutdown()
    cluster.shutdown()
"""


@dataclass(frozen=True)
class RayCluster:
    address: str
    scratch: Path  # everything that Ray writes, its logs too
    owner: subprocess.Popen[str]

    def free_roles(self) -> list[str]:
        """The roles for which some node still has room."""
        return self._tell("")

    def add_node(self, role: str) -> None:
        self._tell(role)

    def pid_of(self, worker: str) -> int:
        """Ray puts it into the name of the process's log."""
        logs = self.scratch.rglob("worker-*.err")
        return next(int(log.stem.rpartition("-")[2]) for log in logs if f"{worker} serves on" in log.read_text())

    def _tell(self, text: str) -> list[str]:
        assert self.owner.stdin is not None
        self.owner.stdin.write(f"{text}\n")
        self.owner.stdin.flush()
        return _line(self.owner, "free")


def _line(owner: subprocess.Popen[str], word: str) -> list[str]:
    """What follows `word` on the next line that begins with it."""
    assert owner.stdout is not None
    return next(line.split()[1:] for line in owner.stdout if line.split()[:1] == [word])


@pytest.fixture
def ray_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[RayCluster]:
    """A head, a prefill node and a decode node. Owned by a process of its own, for Ray keeps globals."""
    for key, value in RAY_SETTINGS.items():
        monkeypatch.setenv(key, value)
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as scratch:
        command = [sys.executable, "-c", textwrap.dedent(CLUSTER), scratch]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        owner = subprocess.Popen(command, text=True, **pipes)
        try:
            yield RayCluster(_line(owner, "address")[0], Path(scratch), owner)
        finally:
            owner.communicate("", timeout=60)


@pytest.mark.slow
async def test_workers_run_on_the_nodes_of_their_role(
    ray_cluster: RayCluster, tiny_config: Path, tmp_path: Path
) -> None:
    assert ray_cluster.free_roles() == ["prefill", "decode"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        control_port = free.getsockname()[1]
    arguments = ("up", "--address", ray_cluster.address, "--config", str(tiny_config))
    async with pdserve(*arguments, "--control-port", str(control_port), logs=tmp_path) as up:
        url = await up.url()
        async with httpx.AsyncClient(timeout=60) as client:
            body = {"model": "tiny", "prompt": "Hello", "max_tokens": 4}
            response = await client.post(f"{url}/v1/completions", json=body)
        assert response.status_code == 200, response.text
        assert ray_cluster.free_roles() == []
        secret = (tmp_path / "secret").read_bytes()
        decode = await decode_worker_of(
            load_config(tmp_path / "serve.yaml").router.control_host + f":{control_port}", secret
        )
        await connect(decode, secret)
        with pytest.raises(IncompatiblePeer, match=r"knows? this cluster's secret"):
            await connect(decode, b"the secret of another run")
        assert not any(secret.decode() in command_line(pid) for pid in all_pids())
        os.kill(ray_cluster.pid_of("decode-0"), signal.SIGKILL)
        await up.line("decode-0 died")
        await up.line("decode-0 registered")
        assert "its last words may be in" in (tmp_path / "decode-0.log").read_text()
        assert await up.stop() == 0
        assert await up.errors() == ""
    written = [path for folder in (ray_cluster.scratch, tmp_path) for path in folder.rglob("*") if path.is_file()]
    assert any(path.suffix == ".log" for path in written)
    assert [path for path in written if secret in path.read_bytes()] == []


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_a_pool_grows_by_the_node_that_it_waited_for_and_shrinks_again_under_load(
    ray_cluster: RayCluster, thrifty_config: Path, tmp_path: Path
) -> None:
    asking = ("--address", ray_cluster.address)  # knows nothing but the Ray cluster, and costs seconds
    knowing = ("--logs", str(tmp_path))
    async with pdserve("up", *asking, "--config", str(thrifty_config), logs=tmp_path) as up:
        url = await up.url()
        async with load_on(url, num_clients=2) as load:
            lonely = await run("scale", "decode", "2", *asking, "--timeout-s", "5")
            assert lonely.code == 1
            assert "decode-1 waits for a node with 1 CPU and 1 decode: " in lonely.lines[-2]
            assert "decode (the cluster has 1, free: 0)" in lonely.lines[-2]
            taken_back = await run("scale", "decode", "1", *knowing)
            assert (taken_back.code, taken_back.lines[-1]) == (0, "decode: 1 of 1 ready")
            for role in ("decode", "prefill"):
                await asyncio.to_thread(ray_cluster.add_node, role)
                for replicas in (2, 1):
                    scaled = await run("scale", role, str(replicas), *knowing)
                    assert (scaled.code, scaled.lines[-1]) == (0, f"{role}: {replicas} of {replicas} ready")
                    await more_answers(load, 4)
        assert load.wrong == []
        assert "decode-1 serves on" in (tmp_path / "decode-1.log").read_text()  # it ran on another node
        assert await up.stop() == 0
        assert await up.errors() == ""
    assert (await run("status", *asking)).lines == ["pdserve: no router of pdserve runs on this Ray cluster"]


@pytest.mark.slow
async def test_on_a_ray_of_its_own_a_drained_worker_stays_away_and_a_router_comes_back_under_its_name(
    tiny_config: Path, tmp_path: Path
) -> None:
    arguments = ("--ray", "--decode", "2", "--config", str(tiny_config))
    async with pdserve("up", *arguments, logs=tmp_path) as up:
        await up.url()
        assert (await run("drain", "decode-1", "--logs", str(tmp_path))).code == 0
        await up.line("decode-1 has left")
        grown = await run("scale", "prefill", "2", "--logs", str(tmp_path))
        assert (grown.code, grown.lines[-1]) == (0, "prefill: 2 of 2 ready")
        control_port = load_config(tmp_path / "serve.yaml").router.control_port
        os.kill(listening(family_of(up.process.pid))["127.0.0.1", control_port], signal.SIGKILL)
        await up.line("router died")
        async with asyncio.timeout(30):
            while (await run("status", "--logs", str(tmp_path))).code:
                await asyncio.sleep(0.2)
        assert (await run("scale", "prefill", "2", "--logs", str(tmp_path))).code == 0  # it is so, once all are back
        status = await run("status", "--logs", str(tmp_path))
        assert {"prefill: 2 of 2 ready", "decode: 1 of 1 ready"} <= set(status.lines)
        assert await up.stop() == 0


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("127.0.0.1:9", "no Ray cluster answers at 127.0.0.1:9"),
        ("somewhere", "--address takes 'auto' or HOST:PORT, not 'somewhere'"),
        ("ray://127.0.0.1:10001", "run pdserve on a node of the cluster"),
    ],
)
async def test_an_address_without_a_cluster_is_a_clear_error(
    address: str, words: str, tiny_config: Path, tmp_path: Path
) -> None:
    arguments = ("up", "--address", address, "--config", str(tiny_config))
    async with pdserve(*arguments, logs=tmp_path) as up:
        errors = await up.errors()
        assert await up.exit_code() == 2
    assert words in errors
    assert errors.count("\n") == 1
