"""load_test.py as it is used: its arguments in, its table, JSON and exit status out."""

from __future__ import annotations

import asyncio
import json
import math
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from common.errors import QueueFull
from common.pb import serving_pb2 as pb
from load_test import main
from loadgen.options import parse_options
from loadgen.slo import Slo
from loadgen.trace import TraceRow
from loadgen.workload import Burst, ClosedLoop, Constant, LengthRange, Poisson, PromptKind, Replay

SCRIPT = Path(__file__).parents[2] / "scripts" / "load_test.py"
SMALL = ["--num-requests", "6", "--input-tokens", "5:9", "--output-tokens", "3", "--timeout", "20"]


async def load_test(*arguments: str) -> int:
    """In a thread: main runs an event loop of its own while the server's keeps turning."""
    return await asyncio.to_thread(main, arguments)


async def test_a_clean_run_prints_a_table_writes_json_and_exits_0(openai_server, tmp_path: Path, capsys) -> None:
    path = tmp_path / "result.json"
    status = await load_test("--url", openai_server.url, *SMALL, "--concurrency", "2", "--json", str(path))
    assert status == 0
    result = json.loads(path.read_text())
    assert (result["completed"], result["failed"], result["errors_by_type"]) == (6, 0, {})
    assert result["total_output_tokens"] == 18
    assert result["total_input_tokens"] == sum(len(body["prompt"]) for body in openai_server.bodies)
    assert result["request_throughput"] == pytest.approx(6 / result["duration"])
    assert result["output_throughput"] == pytest.approx(18 / result["duration"])
    for latency in ("ttft", "tpot", "itl", "e2el"):
        assert result[f"median_{latency}_ms"] == result[f"p50_{latency}_ms"]
        assert 0 <= result[f"p50_{latency}_ms"] <= result[f"p99_{latency}_ms"]
        assert result[f"mean_{latency}_ms"] >= 0
    assert (result["max_concurrency"], result["num_prompts"], result["tokens_per_event"]) == (2, 6, 1.0)
    output = capsys.readouterr().out
    for name in ("TTFT", "TPOT", "ITL", "end-to-end", "requests/s", "output tokens/s", "total tokens/s", "failed"):
        assert name in output
    assert len({len(line) for line in output.splitlines() if line.startswith(("│ TTFT", "│ TPOT", "│ ITL"))}) == 1


async def test_objectives_tell_attainment_and_goodput(openai_server, tmp_path: Path, capsys) -> None:
    async def slow_every_third(body: dict) -> AsyncIterator[str]:
        if len(openai_server.bodies) % 3 == 0:
            await asyncio.sleep(0.6)
        async for event in openai_server.whole_answer(body):
            yield event

    openai_server.answer = slow_every_third
    path = tmp_path / "result.json"
    objectives = ["--slo", "ttft:0.5", "--percentiles", "75,99.9"]
    assert await load_test("--url", openai_server.url, *SMALL, *objectives, "--json", str(path)) == 0
    result = json.loads(path.read_text())
    assert result["slo_attainment"] == pytest.approx(4 / 6)
    assert result["request_goodput"] == pytest.approx(4 / result["duration"])
    assert result["p75_ttft_ms"] <= result["p99.9_ttft_ms"]
    assert "p50_ttft_ms" not in result
    output = capsys.readouterr().out
    assert "66.7%" in output
    assert "p99.9" in output


async def test_a_sweep_finds_the_rate_that_keeps_the_objectives(openai_server, tmp_path: Path, capsys) -> None:
    """A server with one place: more than 33 requests a second queue up in front of it."""
    place = asyncio.Lock()

    async def one_at_a_time(body: dict) -> AsyncIterator[str]:
        async with place:
            await asyncio.sleep(0.03)
        async for event in openai_server.whole_answer(body):
            yield event

    openai_server.answer = one_at_a_time
    paths = [tmp_path / name for name in ("result.json", "report.html")]
    arguments = ["--sweep", "--slo", "ttft:0.3", "--rate", "200", "--num-requests", "30", "--json", str(paths[0])]
    small = ["--input-tokens", "5", "--output-tokens", "3", "--html", str(paths[1])]
    assert await load_test("--url", openai_server.url, *arguments, *small) == 0
    [sweep] = json.loads(paths[0].read_text())["sweeps"]
    assert 0 < sweep["highest_rate"] < sweep["lowest_miss"] <= 200
    assert "at " in capsys.readouterr().out
    assert "SLO attainment against rate" in paths[1].read_text()


async def test_warmups_are_sent_but_not_measured(openai_server, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    assert await load_test("--url", openai_server.url, *SMALL, "--warmup", "2", "--json", str(path)) == 0
    assert json.loads(path.read_text())["completed"] == 6
    prompts = [tuple(body["prompt"]) for body in openai_server.bodies]
    assert len(prompts) == len(set(prompts)) == 8


async def test_the_requests_are_written_as_a_trace_for_perfetto(openai_server, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    assert await load_test("--url", openai_server.url, *SMALL, "--chrome-trace", str(path)) == 0
    events = json.loads(path.read_text())["traceEvents"]
    assert sum(event["ph"] == "X" and event["cat"] == "request" for event in events) == 6


async def test_failures_are_named_and_exit_1(openai_server, queue_full, tmp_path: Path, capsys) -> None:
    openai_server.refusal = queue_full
    path = tmp_path / "result.json"
    assert await load_test("--url", openai_server.url, *SMALL, "--rate", "inf", "--json", str(path)) == 1
    result = json.loads(path.read_text())
    assert (result["completed"], result["failed"]) == (0, 6)
    assert result["errors_by_type"] == {"HTTP 429 queue_full": 6}
    assert result["mean_ttft_ms"] is None
    output = capsys.readouterr().out
    assert "HTTP 429 queue_full" in output
    assert "256 requests wait already" in output


async def test_two_targets_get_the_same_schedule_and_stand_side_by_side(
    openai_server, grpc_server, tmp_path: Path, capsys
) -> None:
    path = tmp_path / "result.json"
    targets = ["--grpc", grpc_server.address, "--url", openai_server.url]
    assert await load_test(*targets, *SMALL, "--concurrency", "1", "--json", str(path)) == 0
    over_grpc = [list(request.prompt_token_ids.ids) for request in grpc_server.requests]
    assert over_grpc == [body["prompt"] for body in openai_server.bodies]
    result = json.loads(path.read_text())
    first, second = result["targets"]
    assert (first["target"], second["target"]) == (f"grpc://{grpc_server.address}", openai_server.url)
    ratio = second["mean_ttft_ms"] / first["mean_ttft_ms"]
    assert result["ratios"]["mean_ttft_ms"] == pytest.approx(ratio)
    output = capsys.readouterr().out
    assert "B / A" in output
    row = next(line for line in output.splitlines() if "TTFT mean ms" in line)
    assert row.rstrip("│ ").endswith(f"{ratio:.2f}")


async def test_tokens_that_come_several_at_a_time_are_noted(grpc_server, capsys) -> None:
    async def bursts(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        yield pb.GenerateResponse(token_ids=[1, 2])
        yield pb.GenerateResponse(token_ids=[3], finish_reason="length")

    grpc_server.answer = bursts
    assert await load_test("--grpc", grpc_server.address, *SMALL) == 0
    assert "18 tokens came in 12 events (1.50 a piece)" in " ".join(capsys.readouterr().out.split())


async def test_some_failures_leave_the_rest_measured(grpc_server, tmp_path: Path) -> None:
    async def refuses_every_second(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        if len(grpc_server.requests) % 2 == 0:
            raise QueueFull("full")
        async for response in grpc_server.whole_answer(request):
            yield response

    grpc_server.answer = refuses_every_second
    path = tmp_path / "result.json"
    assert await load_test("--grpc", grpc_server.address, *SMALL, "--json", str(path)) == 1
    result = json.loads(path.read_text())
    assert (result["completed"], result["failed"]) == (3, 3)
    assert result["errors_by_type"] == {"grpc RESOURCE_EXHAUSTED QueueFull": 3}
    assert result["mean_ttft_ms"] > 0


@pytest.mark.parametrize("kind", ["--url", "--grpc"])
async def test_no_server_is_one_line_and_exit_1(kind: str, free_port: int, capsys) -> None:
    address = f"http://127.0.0.1:{free_port}" if kind == "--url" else f"127.0.0.1:{free_port}"
    assert await load_test(kind, address, *SMALL) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("load_test: no server at ")
    assert captured.err.count("\n") == 1


async def test_ctrl_c_reports_what_was_measured(openai_server) -> None:
    second_is_waiting = asyncio.Event()

    async def stalls_on_the_second(body: dict) -> AsyncIterator[str]:
        if len(openai_server.bodies) > 1:
            second_is_waiting.set()
            await asyncio.Event().wait()
        async for event in openai_server.whole_answer(body):
            yield event

    openai_server.answer = stalls_on_the_second
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        SCRIPT,
        "--url",
        openai_server.url,
        *SMALL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(30):
        await second_is_waiting.wait()
        process.send_signal(signal.SIGINT)
        output, errors = await process.communicate()
    assert process.returncode == 130
    assert "interrupted" in errors.decode()
    assert "Traceback" not in errors.decode()
    completed = next(line for line in output.decode().splitlines() if "completed" in line)
    assert completed.split("│")[2].strip() == "1"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--rate", "0"],
        ["--rate", "nan"],
        ["--rate", "2", "--concurrency", "3"],
        ["--rate", "inf", "--duration", "3"],
        ["--concurrency", "1.5"],
        ["--input-tokens", "9:3"],
        ["--output-tokens", "0"],
        ["--input-tokens", "64:"],
        ["--arrivals", "burst"],
        ["--max-model-len", "10"],
        ["--tls"],
        ["--config", "serve.yaml"],
        ["--json", "same.txt", "--csv", "same.txt"],
        ["--trace", "nowhere.csv"],
        ["--url", "127.0.0.1:8000"],
        ["--grpc", "http://127.0.0.1:8001"],
        ["--grpc", "8001"],
        ["--url", "http://a", "--url", "http://b", "--url", "http://c"],
        ["--endpoint", "chat", "--prompts", "ids"],
        ["--json", "/nowhere/at/all/result.json"],
        ["--vocab-size", "1"],
        ["--seed", "-1"],
        ["--rate", "inf", "--num-requests", "3", "--arrivals", "constant"],
        ["--trace-bin", "3"],
        ["--slo", "ttft"],
        ["--slo", "itl:1"],
        ["--percentiles", "50,101"],
        ["--sweep"],
        ["--trace-speed", "2"],
        ["--rate", "2", "--burst-size", "3"],
        ["--sweep", "1.5", "--slo", "ttft:1"],
        ["--sweep", "--slo", "ttft:1", "--concurrency", "2"],
        ["--sweep", "--slo", "ttft:1", "--duration", "2"],
        ["--compare", "disaggregated,together"],
        ["--compare", "colocated,colocated"],
        ["--compare", "colocated", "--url", "http://a"],
        ["--compare", "colocated", "--input-tokens", "5"],
        ["--html", "/nowhere/at/all/report.html"],
        ["--no-such-option"],
    ],
)
def test_bad_usage_is_exit_2(arguments: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as exit_status:
        parse_options(arguments)
    assert exit_status.value.code == 2
    assert "load_test.py: error: " in capsys.readouterr().err


def test_the_defaults_are_a_hundred_requests_from_one_client() -> None:
    options = parse_options([])
    assert options.workload.pacing == ClosedLoop(1)
    assert (options.workload.num_requests, options.workload.prompt_kind) == (100, PromptKind.IDS)
    assert [target.address for target in options.targets] == ["http://127.0.0.1:8000"]


def test_chat_takes_words() -> None:
    assert parse_options(["--endpoint", "chat"]).workload.prompt_kind is PromptKind.TEXT


def test_rates_and_lengths_are_taken() -> None:
    workload = parse_options(["--rate", "inf", "--num-requests", "3", "--input-tokens", "128:1024"]).workload
    assert workload.pacing == Poisson(math.inf)
    assert workload.input_tokens == LengthRange(128, 1024)


def test_a_rate_can_be_spread_in_three_ways() -> None:
    assert parse_options(["--rate", "2", "--arrivals", "constant"]).workload.pacing == Constant(2.0)
    burst = parse_options(["--rate", "2", "--arrivals", "burst", "--burst-size", "5"])
    assert burst.workload.pacing == Burst(2.0, 5)


def test_objectives_and_percentiles_are_taken() -> None:
    judgement = parse_options(["--slo", "ttft:3,tpot:0.15", "--percentiles", "99.9,50"]).judgement
    assert (judgement.slo, judgement.percentiles) == (Slo(3.0, 0.15), (50.0, 99.9))


def test_a_comparison_has_a_pace_of_its_own() -> None:
    options = parse_options(["--compare", "colocated,http://b:8000"])
    assert options.workload.pacing == ClosedLoop(4)
    assert (options.workload.num_requests, options.num_warmups) == (16, 2)
    assert [contestant.url for contestant in options.contestants] == [None, "http://b:8000"]
    assert parse_options(["--compare", "colocated", "--rate", "2"]).workload.pacing == Poisson(2.0)


def test_a_trace_is_replayed_unless_a_pace_is_given(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 9, "output_length": 2}\n')
    replayed = parse_options(["--trace", str(path), "--trace-speed", "3"]).workload
    assert (replayed.pacing, replayed.trace) == (Replay(3.0), (TraceRow(0.0, 9, 2),))
    assert parse_options(["--trace", str(path), "--concurrency", "2"]).workload.pacing == ClosedLoop(2)
    with pytest.raises(SystemExit):
        parse_options(["--trace", str(path), "--input-tokens", "5"])
