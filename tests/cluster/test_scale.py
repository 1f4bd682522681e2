"""`pdserve scale` as a person types it, while clients stream: workers come and go, and no answer changes."""

from __future__ import annotations

import asyncio
import io
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from cluster.registry_client import cluster_status
from cluster.running import RunningDeployment, find_running
from cluster.status import show_status
from common.config import ServeConfig
from tests.cluster.pdserve_process import Ended, PdserveProcess, pdserve, run
from tests.cluster.steady_load import load_on, more_answers


async def scale(logs: Path, pool: str, replicas: int, *more: str) -> Ended:
    return await run("scale", pool, str(replicas), *more, "--logs", str(logs))


async def all_blocks_are_free(found: RunningDeployment) -> list[str]:
    """Waits for it; the workers that are left."""
    async with asyncio.timeout(10):
        while True:
            status = await cluster_status(found.control_address, found.access, timeout_s=5)
            if all(worker.load.free_blocks == worker.load.total_blocks for worker in status.workers):
                return [worker.hello.worker_id for worker in status.workers]
            await asyncio.sleep(0.1)


@pytest.fixture
def busy_everywhere(tiny_config: Path, tmp_path: Path) -> Path:
    """The tiny model's config, so that every worker gets work, whatever is cached, and hands some of it over when it
    leaves: its answers have no time to end there."""
    tree = yaml.safe_load(tiny_config.read_text())
    tree["router"] |= {"disaggregation": "always", "policy": "round_robin"}
    for role in ("prefill", "decode"):
        tree[role]["drain_timeout_s"] = 0.1
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@asynccontextmanager
async def up(config: Path, logs: Path) -> AsyncIterator[tuple[PdserveProcess, str]]:
    async with pdserve("up", "--config", str(config), logs=logs) as running:
        yield running, await running.url()
        assert await running.stop() == 0
        assert await running.errors() == ""


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_pools_grow_and_shrink_under_load_and_every_answer_stays_the_same(
    busy_everywhere: Path, tmp_path: Path
) -> None:
    logs = tmp_path / "logs"
    async with up(busy_everywhere, logs) as (running, url):
        async with load_on(url, max_tokens=256) as load:
            for pool in ("prefill", "decode"):
                grown = await scale(logs, pool, 2)
                assert (grown.code, grown.lines[-1]) == (0, f"{pool}: 2 of 2 ready")
                await more_answers(load)
                shrunk = await scale(logs, pool, 1)
                assert (shrunk.code, shrunk.lines[-1]) == (0, f"{pool}: 1 of 1 ready")
                assert shrunk.lines[0].startswith(f"{pool}: 1 of 1 ready; {pool}-1 is ")
                await more_answers(load)
        assert load.wrong == []
        found = find_running(ServeConfig(), None, logs)
        assert sorted(await all_blocks_are_free(found)) == ["decode-0", "prefill-0"]
        await running.line("decode-1 has left")
    requests = (logs / "router.log").read_text()
    for served in ("prefill=prefill-1 decode=decode-0", "prefill=prefill-0 decode=decode-1"):
        assert served in requests


@pytest.mark.slow
async def test_what_cannot_be_done_is_said_and_changes_nothing(tiny_config: Path, tmp_path: Path) -> None:
    config, model = with_a_model_of_its_own(tiny_config, tmp_path)
    logs = tmp_path / "logs"
    async with up(config, logs) as (running, _):
        refused = await scale(logs, "prefill", 0)
        assert refused.code == 1
        assert "0 prefill and 1 decode workers cannot serve" in refused.lines[-1]

        hasty = await scale(logs, "decode", 2, "--timeout-s", "0.01")
        assert hasty.code == 1
        assert hasty.lines[-1] == "not done after 0.01 s. The wish stays; `pdserve scale` takes it back"
        for _ in range(2):
            assert (await scale(logs, "decode", 2)).lines[-1] == "decode: 2 of 2 ready"
        assert len(running.children()) == 4

        for weights in model.glob("*.safetensors"):
            weights.unlink()
        hopeless = await scale(logs, "decode", 3)
        assert hopeless.code == 1
        assert hopeless.lines[-1].startswith("decode: 2 wished now, and not 3: decode-2")
        await running.line("decode-2 is given up")

        console = Console(file=io.StringIO(), record=True, width=160)
        assert await show_status(find_running(ServeConfig(), None, logs), console) == 0
        assert {"prefill: 1 of 1 ready", "decode: 2 of 2 ready"} <= set(console.export_text().splitlines())


def with_a_model_of_its_own(tiny_config: Path, folder: Path) -> tuple[Path, Path]:
    """A config, and the model's folder, which a test may spoil."""
    tree = yaml.safe_load(tiny_config.read_text())
    model = folder / "model"
    shutil.copytree(tree["model"]["source"], model)
    tree["model"]["source"] = str(model)
    path = folder / "serve.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path, model


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("encode", "2"), 2, "invalid choice: 'encode'"),
        (("prefill", "-1"), 2, "'-1' is not a number from 0 up"),
        (("prefill", "2", "--router", "127.0.0.1:9"), 1, "no router answers at 127.0.0.1:9"),
    ],
)
async def test_a_wish_that_nobody_can_hear_is_a_clear_error(arguments: tuple[str, ...], code: int, words: str) -> None:
    ended = await run("scale", *arguments)
    assert ended.code == code
    assert words in ended.lines[-1]
