"""bench_router.py: what its figures mean, that its stub workers answer like workers, and the whole script."""

from __future__ import annotations

import asyncio
import json
import math
import os
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from bench_router import main
from common.config import Role, ServeConfig
from router.server import RouterServer
from routerbench.answer import Answer, AnswerFailed, Client, Question
from routerbench.figures import Figure, figures_json, figures_of
from routerbench.grpc_clients import DirectClient, GrpcClient
from routerbench.http_client import HttpClient, texts
from routerbench.load import LatencySample, RateSample, latency_of
from routerbench.measure import MemorySample, PoolSamples, Samples
from routerbench.report import report_tables
from routerbench.stub_workers import Pace, Stage, StubWorker
from tests.end_to_end.local_cluster import wait_until
from tests.end_to_end.tiny_model import save_tiny_model

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_router.py"
QUESTION = Question("Once", tuple(b"Once"), 5)
POOLS = [(Role.COLOCATED,), (Role.PREFILL, Role.DECODE)]

# ---------------------------------------------------------------- figures


def a_pool(ttft_s: float = 0.005, event_s: float = 1 / 8000) -> PoolSamples:
    direct, routed = LatencySample([0.001], [0.02], [0.0005]), LatencySample([ttft_s], [0.0202], [0.001])
    rates = RateSample(2.0, 1.0, 10, 1000, 500, 1 / event_s)
    ways = {"http": [rates], "grpc": [rates]}
    return PoolSamples({"direct": [direct], "http": [routed], "grpc": [routed]}, ways, ways, ways)


def by_name(figures: Sequence[Figure]) -> dict[str, float]:
    return {figure.name: figure.value for figure in figures}


def test_what_the_router_adds_is_the_difference_from_a_direct_call() -> None:
    values = by_name(figures_of(Samples({"pair": a_pool()})))
    assert values["pair.direct.ttft_p50"] == pytest.approx(1.0)
    assert values["pair.http.ttft_p50"] == pytest.approx(5.0)
    assert values["pair.http.added_ttft_p50"] == pytest.approx(4.0)
    assert values["pair.grpc.added_itl_p50"] == pytest.approx(0.2)
    assert values["pair.grpc.added_delay_p99"] == pytest.approx(0.5)
    assert "pair.direct.added_ttft_p50" not in values


def test_rates_count_events_and_the_tokens_in_them() -> None:
    values = by_name(figures_of(Samples({"pair": a_pool()})))
    assert values["pair.http.stream_events"] == pytest.approx(8000)
    assert values["pair.http.stream_tokens"] == pytest.approx(16000)
    assert values["pair.http.paced_cpu"] == pytest.approx(1000)
    assert values["pair.http.requests"] == pytest.approx(5)
    assert values["pair.http.request_cpu"] == pytest.approx(100)


@pytest.mark.parametrize(
    ("pool", "metric", "holds"),
    [
        (a_pool(ttft_s=0.003), "added_ttft_p50", True),
        (a_pool(ttft_s=0.0031), "added_ttft_p50", False),
        (a_pool(), "added_itl_p50", True),
        (a_pool(event_s=1 / 4999), "stream_events", False),
    ],
)
def test_goals_are_those_of_the_router(pool: PoolSamples, metric: str, holds: bool) -> None:
    found = {figure.name: figure.holds for figure in figures_of(Samples({"pair": pool}))}
    assert found[f"pair.http.{metric}"] is holds


def test_memory_is_flat_while_it_grows_by_less_than_a_twentieth() -> None:
    for last, holds in ((1049, True), (1051, False)):
        memory = MemorySample(2048.0, {10: 1000 * 2**20, 50: 900 * 2**20, 100: last * 2**20})
        figures = {figure.name: figure for figure in figures_of(Samples(memory=memory))}
        assert figures["memory.open_stream"].value == 2.0
        assert figures["memory.resident_at_50_requests"].value == 900
        assert figures["memory.growth"].holds is holds


def test_json_and_table_tell_every_figure() -> None:
    memory = MemorySample(2048.0, {10: 2**20, 50: 2**20, 100: 2**20})
    figures = figures_of(Samples({"colocated": a_pool(), "pair": a_pool(ttft_s=0.1)}, memory))
    rows = figures_json(figures)
    assert len({row["name"] for row in rows}) == len(rows)
    [late] = [row for row in rows if row["name"] == "pair.http.added_ttft_p50"]
    assert late == {"name": late["name"], "value": pytest.approx(99), "unit": "ms", "goal": "<= 2", "holds": False}

    console = Console(file=StringIO(), width=110)
    for table in report_tables(figures, "a title"):
        console.print(table)
    assert isinstance(console.file, StringIO)
    lines = console.file.getvalue().splitlines()
    assert "…" not in "".join(lines)
    [row] = [line.split() for line in lines if line.strip().startswith("added ttft p50")]
    assert row == ["added", "ttft", "p50", "ms", "–", "4.00", "4.00", "–", "99.00", "99.00", "<=", "2"]


def test_delay_is_told_only_of_answers_whose_tokens_came_one_by_one() -> None:
    answers = [Answer("a", 0.0, [1.0, 2.0, 4.0], 3), Answer("b", 0.5, [1.0, 2.0], 3)]
    sample = latency_of(answers, {"a": [0.5, 1.5, 3.0], "b": [0.5, 1.5, 1.6]})
    assert sample == LatencySample([1.0, 0.5], [2.0], [0.5, 0.5, 1.0])


# ---------------------------------------------------------------- stub workers behind a real router


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def router(model: Path) -> AsyncIterator[RouterServer]:
    ports = {"http_port": 0, "grpc_port": 0, "control_port": 0}
    server = await RouterServer.start(ServeConfig.model_validate({"model": {"source": str(model)}, "router": ports}))
    try:
        yield server
    finally:
        await server.stop()


async def start_stubs(router: RouterServer, model: Path, roles: Sequence[Role], pace: Pace) -> list[StubWorker]:
    stage = Stage(model.name, 258, tuple(b"abc"), pace)
    stubs = [await StubWorker.start(role, f"{role}-0", stage, router.control_address) for role in roles]

    async def is_ready() -> bool:
        client = HttpClient(router.http_url, model.name)
        try:
            await client.ask(Question("?", (63,), 1))
        except AnswerFailed:
            return False
        finally:
            await client.close()
        return True

    await wait_until(is_ready, 20.0, "the router takes requests")
    return stubs


@pytest.mark.parametrize("roles", POOLS)
async def test_an_answer_is_the_same_whichever_way_it_is_asked_for(
    router: RouterServer, model: Path, roles: Sequence[Role]
) -> None:
    stubs = await start_stubs(router, model, roles, Pace(0.0))
    clients: list[Client] = [
        HttpClient(router.http_url, model.name),
        GrpcClient(router.grpc_address),
        DirectClient([stub.address for stub in stubs]),
    ]
    try:
        for client in clients:
            answer = await client.ask(QUESTION)
            assert (answer.num_tokens, len(answer.event_s)) == (5, 5)
            assert answer.start_s < answer.event_s[0]
    finally:
        for each in (*(client.close() for client in clients), *(stub.stop() for stub in stubs)):
            await each


@pytest.mark.parametrize("roles", POOLS)
async def test_stub_workers_say_what_they_were_told_to(
    router: RouterServer, model: Path, roles: Sequence[Role]
) -> None:
    stubs = await start_stubs(router, model, roles, Pace(0.001))
    try:
        body = await whole_answer(router, {"model": model.name, "prompt": "Once", "max_tokens": 7, "stream": True})
        assert "".join(texts(body)) == "abcabca"
    finally:
        for stub in stubs:
            await stub.stop()


async def whole_answer(router: RouterServer, request: Mapping[str, object]) -> bytes:
    host, _, port = router.http_url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps(request).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
    writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
    try:
        return await asyncio.wait_for(reader.read(), 20.0)
    finally:
        writer.close()


async def test_all_sequences_of_a_stub_get_their_tokens_at_the_same_tick(router: RouterServer, model: Path) -> None:
    step_s = 0.05
    stubs = await start_stubs(router, model, [Role.COLOCATED], Pace(step_s))
    client = DirectClient([stubs[0].address])
    try:
        answers = await asyncio.gather(*(client.ask(QUESTION) for _ in range(3)))
        # ticks are at whole multiples of the step: no token but the first of an answer leaves before one
        assert all(answer.event_s[-1] - answer.event_s[0] > 3 * step_s for answer in answers)
    finally:
        await client.close()
        await stubs[0].stop()


async def test_a_client_says_so_when_an_answer_is_refused(router: RouterServer, model: Path) -> None:
    client = HttpClient(router.http_url, "another model")
    with pytest.raises(AnswerFailed, match="model_not_found"):
        await client.ask(QUESTION)
    await client.close()


async def test_tokens_do_not_wait_for_the_client_to_acknowledge_the_one_before(router: RouterServer) -> None:
    client = HttpClient(router.http_url, "any")
    with pytest.raises(AnswerFailed):
        await client.ask(QUESTION)
    [connection] = router._http_servers[0].server_state.connections
    sock = connection.transport.get_extra_info("socket")
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    await client.close()


# ---------------------------------------------------------------- the script


@pytest.mark.parametrize("option", ["--passes=-1", "--memory-requests=9", "--json=/no/such/folder/file", "--sizes=1"])
def test_a_mistake_in_an_option_is_named(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([option])
    assert option.partition("=")[0] in capsys.readouterr().err


def test_a_missing_configuration_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml" in capsys.readouterr().err


@pytest.mark.slow
async def test_the_script_measures_every_figure_of_a_real_router(model: Path, tmp_path: Path) -> None:
    config, result = tmp_path / "serve.yaml", tmp_path / "result.json"
    config.write_text(f"model: {{source: {model}}}\n")
    pipe = asyncio.subprocess.PIPE
    arguments = ("--quick", "--memory-requests", "100", "--config", str(config), "--json", str(result))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SCRIPT.parents[1]), str(SCRIPT.parent)])}
    script = await asyncio.create_subprocess_exec(
        sys.executable, str(SCRIPT), *arguments, stdout=pipe, stderr=pipe, cwd=SCRIPT.parents[1], env=environment
    )
    output, errors = await asyncio.wait_for(script.communicate(), 100.0)
    assert script.returncode == 0, errors.decode()
    figures = {figure["name"]: figure for figure in json.loads(result.read_text())}
    for pool in ("colocated", "pair"):
        for way in ("http", "grpc"):
            assert figures[f"{pool}.{way}.stream_events"]["value"] > 0
            assert math.isfinite(figures[f"{pool}.{way}.added_ttft_p50"]["value"])
    assert figures["memory.resident_at_100_requests"]["value"] > 1
    assert "pair: pass 1 of 1" in errors.decode()
    assert "…" not in output.decode()
