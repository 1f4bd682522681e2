"""pdserve up, status and demo as a person runs them, on a tiny real model."""

from __future__ import annotations

import asyncio
import io
import os
import re
import signal
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from cluster.drain import DrainWish, drain
from cluster.running import RunningDeployment, find_running
from cluster.status import show_status
from common.cluster_access import ClusterAccess
from common.config import ServeConfig
from common.errors import InvalidRequest, WorkerUnavailable
from tests.cluster.pdserve_process import END_S, command_line, is_alive, pdserve, until


def is_healthy(url: str) -> bool:
    return httpx.get(f"{url}/health", timeout=5).status_code == 200


def answer(url: str) -> str:
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


async def test_up_serves_until_ctrl_c_and_leaves_nothing(tiny_config: Path, tmp_path: Path) -> None:
    console = Console(record=True, width=200, file=(tmp_path / "out").open("w"))
    async with pdserve("up", "--config", str(tiny_config), logs=tmp_path) as up:
        url = await up.url()
        assert is_healthy(url)
        assert answer(url)
        assert await show_status(find_running(ServeConfig(), None, tmp_path), console) == 0
        members = up.children()
        assert len(members) == 3
        assert await up.stop(signal.SIGINT) == 0
        assert await up.errors() == ""
    assert not any(is_alive(pid) for pid in members)
    table = console.export_text()
    assert "prefill-0" in table
    assert "decode-0" in table
    assert re.search(r"prefill-0\s+decode-0\s+good", table)
    assert "ready, up" in table


async def test_a_second_ctrl_c_does_not_wait_for_what_is_being_answered(tiny_config: Path, tmp_path: Path) -> None:
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    async with pdserve("up", "--config", str(tiny_config), logs=tmp_path) as up, httpx.AsyncClient() as http:
        url = await up.url()
        members = up.children()
        async with http.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            lines = response.aiter_lines()
            assert (await anext(lines)).startswith("data: {")
            up.process.send_signal(signal.SIGINT)
            assert "for at most 30 s; Ctrl-C again stops at once" in await up.line("stopping")
            assert (await anext(lines)) == ""  # it goes on
            up.process.send_signal(signal.SIGINT)
            async with asyncio.timeout(END_S / 2):
                told = [line async for line in lines if line]
                assert await up.process.wait() == 0
        assert await up.errors() == ""
    assert "shutting down" in told[-1]
    assert not any(is_alive(pid) for pid in members)


async def test_a_killed_worker_comes_back_and_the_same_answer_is_served(tiny_config: Path, tmp_path: Path) -> None:
    async with pdserve("up", "--config", str(tiny_config), logs=tmp_path) as up:
        url = await up.url()
        before = answer(url)
        os.kill(up.child("decode-0"), signal.SIGKILL)
        await up.line(r"decode-0 died \(killed by SIGKILL\), starting again in 0.5 s")
        await up.line("decode-0 registered")
        await until(lambda: is_healthy(url))
        assert answer(url) == before
        assert await up.stop(signal.SIGTERM) == 0


async def test_workers_find_a_router_that_was_killed_and_came_back(tiny_config: Path, tmp_path: Path) -> None:
    async with pdserve("up", "--config", str(tiny_config), logs=tmp_path) as up:
        url = await up.url()
        router = next(iter(set(up.children()) - {up.child("prefill-0"), up.child("decode-0")}))
        os.kill(router, signal.SIGKILL)
        await up.line(r"router died \(killed by SIGKILL\)")
        await until(lambda: answers(url) and is_healthy(url))
        assert answer(url)
        assert await up.stop() == 0


async def test_ctrl_c_while_loading_is_a_clean_stop(tiny_config: Path, tmp_path: Path) -> None:
    async with pdserve("up", "--config", str(tiny_config), logs=tmp_path) as up:
        await up.line("logs in")
        await until(lambda: len(up.children()) == 3)
        members = up.children()
        assert await up.stop() == 0
        assert await up.errors() == ""
    assert not any(is_alive(pid) for pid in members)


async def test_nothing_survives_a_kill_of_the_command_itself(tiny_config: Path, tmp_path: Path) -> None:
    async with pdserve("up", "--config", str(tiny_config), logs=tmp_path) as up:
        await up.url()
        members = up.children()
        assert len(members) == 3
        up.process.kill()
        await up.process.wait()
        await until(lambda: not any(is_alive(pid) for pid in members), timeout_s=5)


async def test_the_demo_streams_an_answer_and_draws_its_timeline(tiny_config: Path, tmp_path: Path) -> None:
    arguments = ("--prompt", "Hi there", "--max-tokens", "12")
    async with pdserve("demo", "--config", str(tiny_config), *arguments, logs=tmp_path) as demo:
        await demo.line("> Hi there")
        await demo.line("stage ")
        for stage in ("queue", "reserve", "prefill_queue", "prefill"):
            assert float((await demo.line(f"{stage} ")).split()[1]) >= 0.0
        await demo.line(r"TTFT \d+ ms, TPOT ")
        assert (await demo.line(r"\d+ prompt tokens")).endswith("prefill on prefill-0, decode on decode-0")
        assert await demo.exit_code() == 0
        assert await demo.errors() == ""


async def test_status_says_when_no_router_answers() -> None:
    with pytest.raises(WorkerUnavailable, match=r"no router answers at 127\.0\.0\.1:9"):
        await show_status(RunningDeployment("127.0.0.1:9", ClusterAccess()), Console(quiet=True), timeout_s=2)


def answers(url: str) -> bool:
    try:
        httpx.get(f"{url}/health", timeout=5)
    except httpx.TransportError:
        return False
    return True


async def test_router_processes_share_the_ports_and_one_may_die(tiny_config: Path, tmp_path: Path) -> None:
    async with pdserve("up", "--config", str(tiny_config), "--router-processes", "2", logs=tmp_path) as up:
        url = await up.url()
        routers = [pid for pid in up.children() if "--control-port" in command_line(pid)]
        assert len(routers) == 2
        dashboards = [(await up.line(r"\s+dashboard")).split()[-1] for _ in routers]
        async with httpx.AsyncClient() as http:
            assert [(await http.get(dashboard)).status_code for dashboard in dashboards] == [200, 200]
            assert len({(await http.get(f"{dashboard}/state")).json()["router"] for dashboard in dashboards}) == 2
            assert (await http.get(f"{url}/dashboard")).status_code == 404  # it would be the one's or the other's
        assert {answer(url) for _ in range(8)} == {answer(url)}
        os.kill(routers[0], signal.SIGKILL)
        await up.line(r"router-\d died \(killed by SIGKILL\)")
        await until(lambda: answers(url))
        assert answer(url)
        assert await up.stop() == 0
        assert await up.errors() == ""


async def test_a_drained_worker_leaves_and_stays_away(tiny_config: Path, tmp_path: Path) -> None:
    async with pdserve("up", "--config", str(tiny_config), "--decode", "2", logs=tmp_path) as up:
        url = await up.url()
        before = answer(url)
        for name in ("decode-0", "decode-1"):  # it is ready with one of them
            if not any(line.startswith(f"{name} registered") for line in up.lines):
                await up.line(f"{name} registered")
        leaving = up.child("decode-0")
        found = find_running(ServeConfig(), None, tmp_path)
        output = io.StringIO()
        wish = DrainWish("decode-0", timeout_s=20)
        assert await asyncio.wait_for(drain(found, wish, Console(file=output)), 30) == 0
        assert output.getvalue().splitlines()[-1] == "decode-0 has left"
        await up.line("decode-0 has left")
        await until(lambda: not is_alive(leaving))
        assert answer(url) == before
        with pytest.raises(InvalidRequest, match="no worker here is called decode-0"):
            await drain(found, wish, Console(quiet=True))
        assert len(up.children()) == 3
        assert await up.stop() == 0
        assert await up.errors() == ""
