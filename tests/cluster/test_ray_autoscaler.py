"""Ray's own autoscaler brings the node that a wish needs, and takes it back once nobody needs it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.pdserve_process import ROOT, pdserve, run
from tests.cluster.steady_load import load_on, more_answers

SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}


@pytest.fixture
def autoscaling_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Its address."""
    for key, value in SETTINGS.items():
        monkeypatch.setenv(key, value)
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        command = [sys.executable, "-m", "tests.cluster.autoscaling_ray", folder]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        owner = subprocess.Popen(command, cwd=ROOT, text=True, **pipes)
        try:
            assert owner.stdout is not None
            [_, address] = owner.stdout.readline().split()
            yield address
        finally:
            owner.communicate("", timeout=60)


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_the_autoscaler_starts_the_node_that_a_wish_needs(
    autoscaling_ray: str, thrifty_config: Path, tmp_path: Path
) -> None:
    asking = ("--address", autoscaling_ray)
    async with pdserve("up", *asking, "--config", str(thrifty_config), logs=tmp_path) as up:
        url = await up.url()
        async with load_on(url, num_clients=2) as load:
            grown = await run("scale", "prefill", "2", *asking)
            assert (grown.code, grown.lines[-1]) == (0, "prefill: 2 of 2 ready")
            assert any("prefill-1 waits for a node with 1 CPU and 1 prefill" in line for line in grown.lines)
            await more_answers(load, 4)
            shrunk = await run("scale", "prefill", "1", "--logs", str(tmp_path))
            assert (shrunk.code, shrunk.lines[-1]) == (0, "prefill: 1 of 1 ready")
            await more_answers(load, 4)
        assert load.wrong == []
        assert await up.stop() == 0
        assert await up.errors() == ""
