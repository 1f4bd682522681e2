"""bench_serving.py: what its figures mean, what it refuses to measure, and the whole script on a tiny real model."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from functools import partial
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from bench_serving import main
from cluster.plan import Plan
from cluster.supervisor import MemberGivenUp
from common.cluster_access import NO_SECRET
from common.config import ServeConfig, load_config
from common.errors import ConfigError
from common.pb import serving_pb2 as pb
from servingbench.client import Answer, BenchFailed, connected
from servingbench.figures import Figure, HandoffSample, Pass, PromptSample, figures_json, figures_of
from servingbench.report import report_table
from servingbench.system import Configuration, handing_over, plan_for, run_system, until_ready
from tests.end_to_end.tiny_model import save_tiny_model

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_serving.py"
PAIR, COLOCATED = Configuration("grpc"), Configuration(None)

AT_PROMPTS = [f"{num_tokens}_prompt_tokens" for num_tokens in (128, 512, 1024, 2048)]
COMMON = ["time_to_ready", *(f"tpot_at_{streams}" for streams in ("1_stream", "4_streams", "16_streams"))]
COMMON += [f"{metric}_at_{at}" for metric in ("ttft", "prefill_rate", "decode_step") for at in AT_PROMPTS]
HANDOFF = [
    f"{metric}_at_{at}"
    for metric in ("exposed_handoff", "transfer", "decode_wait", "transfer_size")
    for at in AT_PROMPTS
]


def sample(ttft_s: float, first_gap_s: float, step_s: float, handoff: HandoffSample | None = None) -> PromptSample:
    return PromptSample(ttft_s, first_gap_s, step_s, handoff)


def by_name(figures: list[Figure]) -> dict[str, float]:
    return {figure.name: figure.value for figure in figures}


# ---------------------------------------------------------------- figures


def test_every_figure_is_a_median() -> None:
    passes = [
        Pass({100: sample(ttft_s, 9.0, step_s)}, {1: [tpot_s], 2: [tpot_s, 0.5]})
        for ttft_s, step_s, tpot_s in ((0.2, 0.010, 0.02), (0.1, 0.030, 0.04), (9.0, 0.020, 0.03))
    ]
    values = by_name(figures_of("colocated", [7.0, 3.0, 5.0], passes))
    assert values == {
        "colocated.time_to_ready": 5.0,
        "colocated.ttft_at_100_prompt_tokens": pytest.approx(200),
        "colocated.prefill_rate_at_100_prompt_tokens": pytest.approx(500),
        "colocated.decode_step_at_100_prompt_tokens": pytest.approx(20),
        "colocated.tpot_at_1_stream": pytest.approx(30),
        "colocated.tpot_at_2_streams": pytest.approx(270),
    }


def test_the_exposed_handoff_is_the_first_gap_less_a_step_of_the_same_request() -> None:
    passes = [
        Pass({8: sample(1.0, gap_s, step_s, HandoffSample(transfer_s, wait_s, num_bytes))}, {})
        for gap_s, step_s, transfer_s, wait_s, num_bytes in (
            (0.050, 0.020, 0.004, 0.040, 800),
            (0.110, 0.100, 0.006, 0.090, 800),  # a slow moment makes both longer
            (0.045, 0.025, 0.005, 0.050, 800),
        )
    ]
    values = by_name(figures_of("pair_grpc", [1.0], passes))
    assert values["pair_grpc.exposed_handoff_at_8_prompt_tokens"] == pytest.approx(20)
    assert values["pair_grpc.transfer_at_8_prompt_tokens"] == pytest.approx(5)
    assert values["pair_grpc.decode_wait_at_8_prompt_tokens"] == pytest.approx(50)
    assert values["pair_grpc.transfer_size_at_8_prompt_tokens"] == 800


def test_json_has_a_goal_only_where_there_is_one() -> None:
    passes = [Pass({100: sample(0.2, 0.03, 0.01)}, {})]
    quick, ttft, *_ = figures_json(figures_of("colocated", [40.0], passes))
    assert quick == {"name": "colocated.time_to_ready", "value": 40.0, "unit": "s", "goal": "<= 40", "holds": True}
    assert ttft == {
        "name": "colocated.ttft_at_100_prompt_tokens",
        "value": 200.0,
        "unit": "ms",
        "goal": None,
        "holds": None,
    }
    slow, *_ = figures_json(figures_of("colocated", [40.1], passes))
    assert slow["holds"] is False


def test_an_answer_tells_the_first_gap_from_the_later_ones() -> None:
    stages = [pb.Stage(name="transfer", seconds=0.5), pb.Stage(name="decode_wait", seconds=0.25)]
    answer = Answer([1.0, 3.0, 3.5, 4.0, 6.0], pb.Timings(ttft_s=0.125, stages=stages))
    assert answer.sample(num_bytes=7) == PromptSample(0.125, 2.0, 0.5, HandoffSample(0.5, 0.25, 7))
    assert answer.sample(num_bytes=None).handoff is None


# ---------------------------------------------------------------- the table


def test_the_table_lines_up_and_puts_each_pair_beside_colocated() -> None:
    at = "2048_prompt_tokens"
    figures = [
        Figure("pair_grpc", "ttft", at, 300.0, "ms"),
        Figure("pair_grpc", "transfer_size", at, 47_190_000, "bytes"),
        Figure("pair_torch_dist", "ttft", at, 1234.5, "ms"),
        Figure("colocated", "ttft", at, 200.0, "ms"),
    ]
    lines = printed(figures)
    assert cells(lines, "2048 prompt tokens") == [
        ["300.00", "1,234.50", "200.00", "1.50", "6.17"],
        ["47.19", "–", "–", "–", "–"],
    ]
    assert len({len(line) for line in lines[1:]}) == 1
    assert any(line.strip() == "handoff: KV moved, MB" for line in lines)


def test_without_colocated_there_are_no_ratios() -> None:
    lines = printed([Figure("pair_grpc", "time_to_ready", "", 5.0, "s", at_most=40)])
    assert "÷" not in "".join(lines)
    assert cells(lines, "start to ready, s") == [["5.00"]]


def printed(figures: list[Figure]) -> list[str]:
    console = Console(file=StringIO(), width=90)
    console.print(report_table(figures, "tiny"))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue().splitlines()


def cells(lines: list[str], label: str) -> list[list[str]]:
    return [line.strip().removeprefix(label).split() for line in lines if line.strip().startswith(label)]


# ---------------------------------------------------------------- the systems that are compared


def test_the_colocated_worker_gets_the_threads_of_both_workers_of_the_pair() -> None:
    config = ServeConfig.model_validate({"decode": {"kv_cache_gib": 0.5}})
    pair, colocated = (plan_for(each, config, num_cores=6) for each in (PAIR, COLOCATED))
    assert pair.worker_names == ["prefill-0", "decode-0"]
    assert (pair.config.prefill.num_threads, pair.config.decode.num_threads) == (3, 3)
    assert colocated.worker_names == ["colocated-0"]
    assert colocated.config.colocated.num_threads == 6
    assert colocated.config.colocated.kv_cache_gib == 0.5


def test_threads_named_in_the_config_are_kept() -> None:
    config = ServeConfig.model_validate({"prefill": {"num_threads": 3}, "decode": {"num_threads": 1}})
    pair, colocated = (plan_for(each, config, num_cores=2) for each in (PAIR, COLOCATED))
    assert (pair.config.prefill.num_threads, pair.config.decode.num_threads) == (3, 1)
    assert colocated.config.colocated.num_threads == 4


def test_every_system_is_one_pair_over_its_transport_on_ports_of_its_own() -> None:
    config = ServeConfig.model_validate({"prefill": {"replicas": 3}, "router": {"host": "0.0.0.0"}})
    plan = plan_for(Configuration("torch_dist"), config, num_cores=2)
    assert plan.worker_names == ["prefill-0", "decode-0"]
    assert plan.config.transfer.transport == "torch_dist"
    router = plan.config.router
    ports = {router.http_port, router.grpc_port, router.control_port}
    assert router.host == "127.0.0.1"
    assert len(ports) == 3
    assert not ports & {0, 8000, 8001, 8002}


def test_a_bench_of_the_handoff_gives_every_prompt_to_a_prefill_worker_and_others_do_as_configured() -> None:
    config = ServeConfig()
    assert plan_for(PAIR, config, num_cores=2).config.router.disaggregation == "auto"
    assert plan_for(PAIR, handing_over(config), num_cores=2).config.router.disaggregation == "always"


async def test_a_member_that_cannot_start_ends_the_run_with_its_own_words(tmp_path: Path) -> None:
    config = ServeConfig.model_validate({"model": {"source": str(tmp_path / "absent.gguf")}})
    plan = plan_for(COLOCATED, config, num_cores=1)
    with pytest.raises(ConfigError, match=r"no such file or folder: .*absent\.gguf"):
        await run_system(plan, tmp_path, partial(until_ready, timeout_s=60))
    assert processes_that_name(tmp_path) == {}


# ---------------------------------------------------------------- what is refused


async def test_a_request_that_was_tried_again_is_not_measured(grpc_server) -> None:
    grpc_server.answer = scripted(pb.Timings(attempts=2, decode_worker="colocated-0"))
    async with connected(
        grpc_server.address, [pb.WorkerHello(role=pb.ROLE_COLOCATED, vocab_size=50)], NO_SECRET
    ) as client:
        with pytest.raises(BenchFailed, match="2 attempts"):
            await client.ask([1, 2, 3], num_tokens=4)


async def test_a_pair_that_did_not_hand_over_is_not_measured(grpc_server) -> None:
    grpc_server.answer = scripted(pb.Timings(attempts=1, decode_worker="decode-0"))
    roles = (pb.ROLE_PREFILL, pb.ROLE_DECODE)
    pair = [pb.WorkerHello(role=role, vocab_size=50, address="127.0.0.1:9") for role in roles]
    async with connected(grpc_server.address, pair, NO_SECRET) as client:
        with pytest.raises(BenchFailed, match="the prompt was computed by decode-0"):
            await client.ask([1, 2, 3], num_tokens=4)


async def test_no_two_prompts_share_a_beginning(grpc_server) -> None:
    """Else the second one would be shorter than it looks to a worker that caches prefixes."""
    grpc_server.answer = scripted(pb.Timings(attempts=1))
    async with connected(
        grpc_server.address, [pb.WorkerHello(role=pb.ROLE_COLOCATED, vocab_size=5000)], NO_SECRET
    ) as client:
        prompts = client.prompts(16, 64) + client.prompts(1, 128) + client.prompts(1, 512) + client.prompts(16, 64)
        answer = await client.ask(prompts[0], num_tokens=4)
    assert len({tuple(prompt[:4]) for prompt in prompts}) == len(prompts) == 34
    assert all(0 <= token_id < 5000 for prompt in prompts for token_id in prompt)
    assert len(answer.token_s) == 4
    assert list(grpc_server.requests[0].prompt_token_ids.ids) == prompts[0]


def scripted(timings: pb.Timings):
    async def answer(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        for _ in range(request.sampling.max_tokens - 1):
            yield pb.GenerateResponse(token_ids=[7])
        yield pb.GenerateResponse(token_ids=[7], finish_reason="length", timings=timings)

    return answer


@pytest.mark.parametrize(
    "arguments", [["--repeats", "0"], ["--modes", "split"], ["--transports", "grpc,tin"], ["--json", "/absent/x.json"]]
)
def test_a_wrong_argument_exits_2_and_names_it(arguments: list[str], capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert arguments[0] in capsys.readouterr().err


def test_a_config_that_is_not_there_exits_2(tmp_path: Path, capsys) -> None:
    assert main(["--config", str(tmp_path / "absent.yaml")]) == 2
    assert "absent.yaml" in capsys.readouterr().err


# ---------------------------------------------------------------- the whole script


@pytest.fixture(scope="module")
def config_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    model = save_tiny_model(folder / "model")
    path = folder / "serve.yaml"
    pool = "{num_threads: 1, kv_cache_gib: 0.02}"
    path.write_text(f"model: {{source: {model}, name: tiny, dtype: float32}}\nprefill: {pool}\ndecode: {pool}\n")
    return path


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder


async def start_script(config_path: Path, scratch: Path, *arguments: str) -> asyncio.subprocess.Process:
    """Its members' files, and so the paths on their command lines, lie in `scratch`."""
    pipe = asyncio.subprocess.PIPE
    command = [sys.executable, str(SCRIPT), "--config", str(config_path), "--repeats", "1", *arguments]
    environment = {**os.environ, "TMPDIR": str(scratch), "COLUMNS": "80"}
    return await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, env=environment)


def processes_that_name(folder: Path) -> dict[int, str]:
    """Command lines by pid."""
    lines = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines[int(path.parent.name)] = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
    return {pid: line for pid, line in lines.items() if str(folder) in line}


def list_ours(scratch: Path) -> list[str]:
    """Not what torch keeps in the temporary folder."""
    return [name for name in os.listdir(scratch) if name.startswith("pdserve")]


async def test_a_member_that_dies_ends_the_run_and_is_not_started_again(config_path: Path, scratch: Path) -> None:
    plan = plan_for(PAIR, load_config(config_path), num_cores=1)

    async def kill_decode_and_wait(plan: Plan) -> None:
        await until_ready(plan, timeout_s=60)
        [pid] = [pid for pid, line in processes_that_name(scratch).items() if "--name decode-0" in line]
        os.kill(pid, signal.SIGKILL)
        await asyncio.Event().wait()

    with pytest.raises(MemberGivenUp, match=r"decode-0 died 1 times in a row \(killed by SIGKILL\)"):
        await run_system(plan, scratch, kill_decode_and_wait)
    assert processes_that_name(scratch) == {}


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_the_script_measures_every_figure_of_every_configuration(
    config_path: Path, tmp_path: Path, scratch: Path
) -> None:
    result = tmp_path / "result.json"
    script = await start_script(config_path, scratch, "--json", str(result))
    output, errors = (text.decode() for text in await script.communicate())
    assert script.returncode == 0, errors
    figures = {figure["name"]: figure for figure in json.loads(result.read_text())}
    pairs = [f"pair_{transport}.{name}" for transport in ("grpc", "torch_dist") for name in COMMON + HANDOFF]
    assert set(figures) == {*pairs, *(f"colocated.{name}" for name in COMMON)}
    for name, figure in figures.items():
        assert set(figure) == {"name", "value", "unit", "goal", "holds"}
        assert math.isfinite(figure["value"])
        if "exposed_handoff" not in name:  # a difference: it may be nothing
            assert figure["value"] > 0, name
        assert (figure["goal"], figure["holds"]) == (("<= 40", True) if "ready" in name else (None, None))
    kv_bytes_per_token = 4 * 2 * 2 * 8 * 4  # layers × (K, V) × kv heads × head_dim × float32
    assert figures["pair_grpc.transfer_size_at_512_prompt_tokens"]["value"] == 512 * kv_bytes_per_token
    assert output.startswith("tiny, ")
    assert len(cells(output.splitlines(), "2048 prompt tokens")) == 7
    assert "…" not in output
    assert list_ours(scratch) == []
    assert processes_that_name(scratch) == {}


@pytest.mark.slow
async def test_an_interrupted_script_leaves_nothing_behind(config_path: Path, scratch: Path) -> None:
    script = await start_script(config_path, scratch, "--modes", "colocated")
    assert script.stderr is not None
    async with asyncio.timeout(60):
        assert re.match(rb"colocated: ready in \d", await script.stderr.readline())
    assert processes_that_name(scratch)
    script.send_signal(signal.SIGINT)
    async with asyncio.timeout(30):
        output, errors = await script.communicate()
    assert (script.returncode, output) == (130, b"")
    assert errors.splitlines()[-1] == b"bench_serving: interrupted; this is what was measured before"
    assert list_ours(scratch) == []
    assert processes_that_name(scratch) == {}
