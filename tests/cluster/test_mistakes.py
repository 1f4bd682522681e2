"""What a person gets wrong ends with exit code 2 and one line that says what to change, and nothing is left running."""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path

import pytest

from tests.cluster.pdserve_process import END_S, ROOT, is_alive, pdserve, until

ANY_PORTS = ("--http-port", "0", "--grpc-port", "0", "--control-port", "0")


async def complaint(*arguments: str, logs: Path) -> str:
    """Run a command that must fail for the person's mistake; its one line of complaint."""
    async with pdserve(*arguments, logs=logs) as command:
        errors = await command.errors()
        assert await command.exit_code() == 2, errors
    assert errors.count("\n") == 1, errors
    return errors.strip()


async def complaint_about(config: str, folder: Path) -> str:
    path = folder / "serve.yaml"
    path.write_text(config)
    return await complaint("up", "--config", str(path), *ANY_PORTS, logs=folder / "logs")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("prefil: {replicas: 2}", "unknown key `prefil`"),
        ("prefill: {replica: 2}", "unknown key `prefill.replica`"),
        ("prefill: {replicas: many}", "`prefill.replicas` is 'many'"),
        ("model: [", "is not valid YAML"),
        ("model: {source: /no/such/model.gguf}", "no such file or folder: /no/such/model.gguf"),
        ("decode: {replicas: 0}", "start at least one of each"),
        ("router: {host: 192.0.2.1}", "router.host is 192.0.2.1, which is no address of this machine"),
        ("security: {secret_file: /no/such/secret}", "security.secret_file: cannot read /no/such/secret"),
    ],
)
async def test_a_wrong_config_is_refused_by_name(config: str, words: str, tmp_path: Path) -> None:
    assert words in await complaint_about(config, tmp_path)


async def test_a_config_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    words = await complaint("up", "--config", str(tmp_path / "absent.yaml"), logs=tmp_path)
    assert "cannot read the config file" in words
    assert "absent.yaml" in words


async def test_a_port_in_use_is_named_with_the_option_that_changes_it(tiny_config: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        words = await complaint("up", "--config", str(tiny_config), "--http-port", port, logs=tmp_path)
    assert f"127.0.0.1:{port} (Address already in use)" in words
    assert "--http-port" in words


@pytest.mark.parametrize(
    "content", [b"not a model", b"GGUF\x03\x00\x00\x00" + b"\xff" * 64], ids=["text", "bad header"]
)
async def test_a_corrupt_gguf_stops_everything_that_was_started(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    (tmp_path / "serve.yaml").write_text(f"model: {{source: {path}}}")
    arguments = ("up", "--config", str(tmp_path / "serve.yaml"), *ANY_PORTS)
    async with pdserve(*arguments, logs=tmp_path / "logs") as command:
        await command.line("logs in")
        await until(lambda: len(command.children()) == 3 or command.process.returncode is not None)
        children = command.children()
        errors = await command.errors()
        assert await command.exit_code() == 2
    assert errors.count("\n") == 1, errors
    assert "broken.gguf" in errors
    assert not any(is_alive(pid) for pid in children)


async def test_a_log_folder_that_cannot_be_made_is_named(tiny_config: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    words = await complaint("up", "--config", str(tiny_config), logs=tmp_path / "file" / "logs")
    assert "cannot make the log folder" in words


async def test_a_bare_worker_that_others_could_reach_without_a_secret_ends_before_it_loads_anything(
    tmp_path: Path,
) -> None:
    (tmp_path / "serve.yaml").write_text("model: {source: /no/such/model.gguf}\nprefill: {host: 0.0.0.0}")
    command = [sys.executable, "-m", "prefill_worker", "--config", str(tmp_path / "serve.yaml")]
    worker = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stderr=asyncio.subprocess.PIPE)
    async with asyncio.timeout(END_S):
        _, errors = await worker.communicate()
    assert worker.returncode == 2
    assert b"prefill.host is 0.0.0.0" in errors
    assert b"security.secret_file" in errors
