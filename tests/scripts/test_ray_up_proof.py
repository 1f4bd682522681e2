"""`ray up` on three hosts of this machine. scripts/ray_up_proof.py does it and checks it; here nothing may be left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rayproof.commands import COMMANDS
from rayproof.stage import missing
from tests.cluster.pdserve_process import all_pids, is_alive, parent_of
from tests.end_to_end.tiny_model import save_tiny_model

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROOF_S = 280.0
END_S = 20.0


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if reason := missing():
        pytest.skip(reason)
    model = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    path = tmp_path_factory.mktemp("config") / "serve.yaml"
    path.write_text(
        f"model: {{source: {model}, name: tiny, dtype: float32}}\n"
        "prefill: {kv_cache_gib: 0.02}\n"
        "decode: {kv_cache_gib: 0.02}\n"
    )
    return path


@pytest.mark.slow
@pytest.mark.timeout(PROOF_S + 2 * END_S)
def test_the_readmes_commands_serve_a_prompt_across_hosts_and_leave_nothing(config: Path) -> None:
    proof = start(config)
    namespaces = namespaces_of(proof, until="hosts: ")
    output, _ = proof.communicate(timeout=PROOF_S)
    assert proof.returncode == 0, output
    assert output.rstrip().endswith("proven")
    assert_nothing_is_left(namespaces)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_hosts_end_with_the_proof_whatever_ends_it(config: Path, number: signal.Signals) -> None:
    proof = start(config)
    namespaces = namespaces_of(proof, until="hosts: ")
    assert len(namespaces) == 4  # the stage's and three hosts'
    proof.send_signal(number)
    proof.communicate(timeout=END_S)
    assert proof.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert_nothing_is_left(namespaces)


def test_the_proof_types_what_the_readme_says() -> None:
    assert [command for command in COMMANDS if command.replace(" -y ", " ") not in README] == []


def start(config: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "scripts/ray_up_proof.py", "--config", str(config)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def namespaces_of(proof: subprocess.Popen[str], until: str) -> set[str]:
    """The process namespaces below it, once it has said so."""
    assert proof.stdout is not None
    said = []
    for line in proof.stdout:
        said.append(line)
        if line.startswith(until):
            break
    else:
        raise AssertionError("".join(said))
    below: set[int | None] = {proof.pid}
    while more := {pid for pid in all_pids() if pid not in below and parent_of(pid) in below}:
        below |= more
    return {process_namespace(pid) for pid in below if pid} - {process_namespace(os.getpid()), ""}


def process_namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # gone, or none of ours
        return ""


def assert_nothing_is_left(namespaces: set[str]) -> None:
    """No process, and with the last process the kernel drops a namespace, its mounts and its network."""
    deadline_s = time.monotonic() + END_S
    while left := [pid for pid in all_pids() if is_alive(pid) and process_namespace(pid) in namespaces]:
        assert time.monotonic() < deadline_s, left
        time.sleep(0.05)
    assert "/run/hosts" not in Path("/proc/self/mounts").read_text()
    assert "10.77.0." not in subprocess.run(["ip", "addr"], capture_output=True, text=True, timeout=10).stdout
