"""bench_transfer.py: what its figures mean, that the raw limits move every byte, and the whole script."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from rich.console import Console

from bench_transfer import main
from common.errors import ConfigError, ServingError
from common.pb import serving_pb2 as pb
from common.transfer_config import TransferConfig
from kv_transfer import factory
from servingbench.client import Answer
from tests.cluster.pdserve_process import all_pids, is_alive, parent_of, until
from tests.end_to_end.tiny_model import save_tiny_model
from transferbench.figures import Figure, figures_json, handoff_figures, transport_figures, unmeasured
from transferbench.goals import YARDSTICKS
from transferbench.link import Sample, linked
from transferbench.measure import Pass
from transferbench.payload import LAYOUT, MB, new_payload
from transferbench.peer import Expect, Peer
from transferbench.raw import Raw, Window
from transferbench.raw_libraries import new_destination, new_source
from transferbench.report import report_tables
from transferbench.serving import Handoff, HandoffPass, Load, Sending, handoff_of

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_transfer.py"
TRANSFER_METRICS = ["rate", "limit", "share", "cpu", "cpu_limit", "checksum_share", "pieces"]


def a_pass(seconds: float = 2.0, limit_s: float = 1.0, cpu_s: float = 3.0, checksum_s: float = 0.1) -> Pass:
    num_bytes = 8 * 10**9
    transfer, limit = Sample(num_bytes, seconds, cpu_s), Sample(num_bytes, limit_s, 1.0)
    return Pass(7, transfer, limit, Sample(num_bytes, 4.0, 1.0), checksum_s)


def by_name(figures: Sequence[Figure]) -> dict[str, float | None]:
    return {figure.name: figure.value for figure in figures}


def holding(figures: Sequence[Figure]) -> dict[str, bool]:
    """Of those with a goal."""
    return {figure.name: figure.holds for figure in figures if figure.holds is not None}


# ---------------------------------------------------------------- figures of transports


def test_every_figure_of_a_transfer_is_a_median() -> None:
    passes = [a_pass(2.0, 1.0, 3.0, 0.1), a_pass(8.0, 1.0, 5.0, 0.8), a_pass(4.0, 1.0, 4.0, 0.04)]
    assert by_name(transport_figures("grpc", {64: passes})) == {
        "grpc.rate_at_64_mb": pytest.approx(2.0),
        "grpc.limit_at_64_mb": pytest.approx(8.0),
        "grpc.share_at_64_mb": pytest.approx(0.25),
        "grpc.beside_at_64_mb": pytest.approx(2.0),
        "grpc.cpu_at_64_mb": pytest.approx(0.5),
        "grpc.cpu_limit_at_64_mb": pytest.approx(0.125),
        "grpc.checksum_share_at_64_mb": pytest.approx(0.05),
        "grpc.pieces_at_64_mb": 7.0,
    }


def test_a_share_is_taken_pass_by_pass_so_that_a_slow_moment_of_the_machine_says_nothing() -> None:
    passes = [a_pass(2.0, 1.0), a_pass(20.0, 10.0), a_pass(4.0, 2.0)]
    assert by_name(transport_figures("tcp", {1: passes}))["tcp.share_at_1_mb"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("transport", "least"), [("grpc", 0.5), ("tcp", 0.8), ("shm", 0.6), ("torch_dist", 0.6), ("nixl", None)]
)
def test_each_transport_is_held_against_its_own_share_of_the_limit(transport: str, least: float | None) -> None:
    for limit_s, holds in ((0.51, False), (1.7, True)):
        figures = transport_figures(transport, {64: [a_pass(2.0, limit_s, checksum_s=0.07)]})
        expected = {f"{transport}.checksum_share_at_64_mb": False}  # 3.5 %
        if least is not None:
            expected[f"{transport}.share_at_64_mb"] = holds
        assert holding(figures) == expected


def test_json_says_what_holds_and_why_something_was_not_measured() -> None:
    share = next(figure for figure in transport_figures("shm", {8: [a_pass(1.0, 0.75)]}) if figure.metric == "share")
    assert figures_json([share, unmeasured("nixl", "skipped: no module\n named nixl")]) == [
        {"name": "shm.share_at_8_mb", "value": 0.75, "unit": "of the limit", "goal": ">= 0.6", "holds": True},
        {"name": "nixl.rate", "value": None, "unit": "skipped: no module named nixl", "goal": None, "holds": None},
    ]


# ---------------------------------------------------------------- figures of the handoff


def handoff_pass(handoffs: Mapping[Load, list[Handoff]], sending: Mapping[int, Sending] | None = None) -> HandoffPass:
    return HandoffPass(handoffs, sending or {})


def test_a_handoff_is_the_median_over_all_requests_of_all_passes() -> None:
    load = Load(512, 2)
    passes = [
        handoff_pass({load: [Handoff(0.01, 0.5), Handoff(0.02, 1.0)]}),
        handoff_pass({load: [Handoff(0.09, 0.3), Handoff(0.03, 1.0)]}),
    ]
    assert by_name(handoff_figures(passes)) == {
        "handoff.exposed_at_512_tokens_2_in_flight": pytest.approx(25.0),
        "handoff.exposed_share_at_512_tokens_2_in_flight": pytest.approx(0.025),
        "handoff.prefill_at_512_tokens_2_in_flight": pytest.approx(750.0),
    }


def test_short_prompts_have_a_goal_in_milliseconds_and_long_ones_a_share_of_their_prefill() -> None:
    slow = {Load(num_tokens, 1): [Handoff(0.016, 0.1)] for num_tokens in (128, 512, 2048)}
    quick = {Load(num_tokens, 8): [Handoff(0.014, 1.0)] for num_tokens in (128, 512, 2048)}
    assert holding(handoff_figures([handoff_pass(slow | quick)])) == {
        "handoff.exposed_at_128_tokens_1_in_flight": False,
        "handoff.exposed_share_at_512_tokens_1_in_flight": False,
        "handoff.exposed_share_at_2048_tokens_1_in_flight": False,
        "handoff.exposed_at_128_tokens_8_in_flight": True,
        "handoff.exposed_share_at_512_tokens_8_in_flight": True,
        "handoff.exposed_share_at_2048_tokens_8_in_flight": True,
    }


def test_the_cost_of_sending_is_how_much_longer_prefill_takes_when_kv_leaves() -> None:
    sending = [Sending([1.1, 1.2, 9.0], [1.0, 0.9, 1.0]), Sending([1.04], [1.0]), Sending([1.0], [1.0])]
    passes = [HandoffPass({}, {128: each}) for each in sending]
    figures = handoff_figures(passes)
    assert by_name(figures) == {"handoff.sending_cost_at_128_tokens": pytest.approx(0.04)}
    assert holding(figures) == {"handoff.sending_cost_at_128_tokens": True}
    assert holding(handoff_figures(passes[:1])) == {"handoff.sending_cost_at_128_tokens": False}


def test_a_handoff_comes_from_the_tokens_at_the_client_and_the_prefill_from_the_routers_timeline() -> None:
    stages = [pb.Stage(name="prefill", seconds=0.75), pb.Stage(name="transfer", seconds=0.5)]
    answer = Answer([1.0, 3.0, 3.5, 4.0, 6.0], pb.Timings(ttft_s=1.0, stages=stages))
    assert handoff_of(answer) == Handoff(exposed_s=1.5, prefill_s=0.75)


# ---------------------------------------------------------------- tables


def test_tables_line_up_and_name_what_was_left_out() -> None:
    figures = [
        *transport_figures("torch_dist", {1: [a_pass()], 256: [a_pass(70.0)]}),
        *transport_figures("tcp", {1: [a_pass()], 256: [a_pass(0.5)]}),
        *handoff_figures([HandoffPass({Load(2048, 8): [Handoff(0.1, 12.0)]}, {2048: Sending([1.03], [1.0])})]),
        unmeasured("nixl", "skipped: the package nixl is not installed"),
    ]
    console = Console(file=StringIO(), width=90)
    for table in report_tables(figures, "KV transfer"):
        console.print(table)
    assert isinstance(console.file, StringIO)
    output = console.file.getvalue()
    assert "…" not in output
    rows = [line.rstrip() for line in output.splitlines() if re.match(r"   \d+ MB ", line)]
    assert [len(row) for row in rows] == [len(rows[0])] * 4
    assert rows[3].split() == ["256", "MB", "7", "16.00", "8.00", "200%", "80%", "2.00", "0.38", "0.12", "20.0%"]
    assert re.search(r"2,048 tokens +8 +12,000\.0 +100\.0 +– +0\.8% +<= 10%", output)
    assert re.search(r"2,048 tokens +3\.0% +<= 5%", output)
    assert "torch_dist: limit: socket, beside: gloo" in output
    assert "skipped: the package nixl is not installed" in output


# ---------------------------------------------------------------- what is sent


@pytest.mark.parametrize(("size", "piece_bytes"), [(1, 128 * 1024), (1, MB), (3, 300_000), (64, 4 * MB)])
def test_a_payload_holds_every_layer_of_every_token_once_and_each_piece_has_its_own_memory(
    size: int, piece_bytes: int
) -> None:
    payload = new_payload(size * MB, piece_bytes)
    covered = torch.zeros(LAYOUT.num_layers, payload.num_tokens, dtype=torch.int32)
    for piece in payload.pieces:
        assert piece.data.is_contiguous()
        layers = slice(piece.layer_start, piece.layer_start + piece.num_layers)
        covered[layers, piece.token_start : piece.token_start + piece.num_tokens] += 1
    assert covered.min() == covered.max() == 1
    assert payload.num_bytes == sum(map(len, payload.buffers)) == size * MB
    places = sorted((piece.data.data_ptr(), piece.num_bytes) for piece in payload.pieces)
    assert all(start + num_bytes <= after for (start, num_bytes), (after, _) in pairwise(places))


@pytest.mark.parametrize("kind", list(Raw))
def test_a_raw_limit_moves_every_byte(kind: Raw) -> None:
    """More pieces than slots, of unlike sizes, twice over."""
    pieces = [memoryview(bytearray([index + 2]) * (1000 * (index + 1) + index)) for index in range(12)]
    sizes = [len(piece) for piece in pieces]
    destination = new_destination(kind)
    source = new_source(kind, destination.address)
    try:
        with ThreadPoolExecutor(1) as other_end:
            for _ in range(2):
                received = other_end.submit(destination.receive, sizes)
                source.send(pieces)
                received.result(timeout=30)
        expected = b"".join(pieces) * 2
        assert destination.window.memory[: len(expected)] == expected
        assert destination.window.memory[len(expected)] == 1
    finally:
        source.close()
        destination.close()


def test_a_window_starts_over_before_a_piece_that_does_not_fit() -> None:
    window = Window()
    window.take(60 * MB)[:1] = b"a"
    window.take(5 * MB)[:1] = b"b"
    assert window.memory[:1] == b"b"


# ---------------------------------------------------------------- the other process


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    with Peer() as peer:
        yield peer


async def test_what_goes_wrong_in_the_other_process_is_raised_here_and_it_goes_on(peer: Peer) -> None:
    with pytest.raises(RuntimeError, match="Open comes first"):
        await peer.ask(Expect((b"0" * 16,), 1))
    assert await peer.cpu_s() > 0


async def test_a_transport_that_is_not_here_is_a_config_error(peer: Peer) -> None:
    with pytest.raises(ConfigError, match="pigeon"):
        async with linked(peer, TransferConfig(transport="pigeon")):
            pass


async def test_a_transfer_of_which_the_other_process_knows_nothing_is_no_sample(peer: Peer) -> None:
    payload = new_payload(MB, MB)
    async with linked(peer, TransferConfig(transport="grpc")) as link:
        sample = await link.sample(payload, count=2)
        assert (sample.num_bytes, sample.seconds > 0, sample.cpu_s > 0) == (MB, True, True)
        with pytest.raises(ServingError):
            await link._send(payload, b"unknown to both.")


def test_the_death_of_the_other_process_is_noticed_at_once() -> None:
    with Peer() as peer:
        assert peer._process.pid is not None
        os.kill(peer._process.pid, signal.SIGKILL)
        with pytest.raises(ConnectionError):
            asyncio.run(peer.cpu_s())


# ---------------------------------------------------------------- the whole script


@pytest.mark.parametrize(
    "arguments",
    [
        ["--repeats", "0"],
        ["--sizes", "1,x"],
        ["--sizes", "4096"],
        ["--transports", "grpc,tin"],
        ["--piece-bytes", "10"],
        ["--piece-bytes", "9999999"],
        ["--json", "/absent/x.json"],
    ],
)
def test_a_wrong_argument_exits_2_and_names_it(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert arguments[0] in capsys.readouterr().err


def test_a_config_that_is_not_there_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(tmp_path / "absent.yaml")]) == 2
    assert "absent.yaml" in capsys.readouterr().err


def test_a_transport_that_is_not_here_is_listed_as_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(factory, "TRANSPORTS", ("grpc",))
    result = tmp_path / "result.json"
    assert main(["--transports", "tcp", "--skip-serving", "--json", str(result)]) == 0
    [figure] = json.loads(result.read_text())
    assert (figure["name"], figure["value"], figure["holds"]) == ("tcp.rate", None, None)
    assert figure["unit"].startswith("skipped: transfer.transport is 'tcp'")
    assert "skipped: transfer.transport is 'tcp'" in capsys.readouterr().out


async def run_script(*arguments: str) -> tuple[int | None, str, str]:
    pipe = asyncio.subprocess.PIPE
    environment = {**os.environ, "COLUMNS": "80"}
    script = await asyncio.create_subprocess_exec(
        sys.executable, str(SCRIPT), *arguments, stdout=pipe, stderr=pipe, env=environment, cwd=SCRIPT.parents[1]
    )
    output, errors = await script.communicate()
    return script.returncode, output.decode(), errors.decode()


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("psm_")}


@pytest.mark.slow
async def test_the_script_measures_every_figure_of_every_transport_and_leaves_no_memory_behind(tmp_path: Path) -> None:
    before, result = shared_memory(), tmp_path / "result.json"
    options = ("--quick", "--sizes", "1", "--skip-serving", "--json", str(result))
    status, output, errors = await run_script("--transports", "grpc,torch_dist,shm", *options)
    assert status == 0, errors
    figures = {figure["name"]: figure for figure in json.loads(result.read_text())}
    expected = {f"{name}.{metric}_at_1_mb" for name in ("grpc", "torch_dist", "shm") for metric in TRANSFER_METRICS}
    assert set(figures) == expected | {f"{name}.beside_at_1_mb" for name in ("grpc", "torch_dist", "shm")}
    for name, figure in figures.items():
        assert set(figure) == {"name", "value", "unit", "goal", "holds"}
        assert math.isfinite(figure["value"])
        assert figure["value"] > 0, name
    assert "grpc: 1 MB" in errors
    assert "…" not in output
    assert shared_memory() <= before


@pytest.mark.slow
async def test_the_script_measures_the_handoff_of_a_real_system(tmp_path: Path) -> None:
    model, config, result = save_tiny_model(tmp_path / "model"), tmp_path / "serve.yaml", tmp_path / "result.json"
    pool = "{num_threads: 1, kv_cache_gib: 0.02}"
    config.write_text(f"model: {{source: {model}, name: tiny, dtype: float32}}\nprefill: {pool}\ndecode: {pool}\n")
    arguments = ("--quick", "--sizes", "1", "--transports", "grpc", "--config", str(config), "--json", str(result))
    status, output, errors = await run_script(*arguments)
    assert status == 0, errors
    figures = {figure["name"]: figure for figure in json.loads(result.read_text())}
    loads = [f"{num_tokens}_tokens_{in_flight}_in_flight" for num_tokens in (128, 512) for in_flight in (1, 2)]
    handoff = {f"handoff.{metric}_at_{at}" for metric in ("exposed", "exposed_share", "prefill") for at in loads}
    handoff |= {f"handoff.sending_cost_at_{num_tokens}_tokens" for num_tokens in (128, 512)}
    assert {name for name in figures if name.startswith("handoff.")} == handoff
    assert all(math.isfinite(figures[name]["value"]) for name in handoff)
    assert figures["handoff.prefill_at_512_tokens_1_in_flight"]["value"] > 0
    assert "sending slows the prefill by" in output


async def test_an_interrupted_script_reports_what_it_has_and_leaves_nothing_behind() -> None:
    before, pipe = shared_memory(), asyncio.subprocess.PIPE
    arguments = ("--transports", "grpc,torch_dist", "--sizes", "1,64", "--skip-serving")
    script = await asyncio.create_subprocess_exec(
        sys.executable, str(SCRIPT), *arguments, stdout=pipe, stderr=pipe, cwd=SCRIPT.parents[1]
    )
    assert script.stderr is not None
    async with asyncio.timeout(60):
        assert await script.stderr.readline() == b"grpc: 1 MB\n"
    children = [pid for pid in all_pids() if parent_of(pid) == script.pid]
    assert children
    script.send_signal(signal.SIGINT)
    async with asyncio.timeout(30):
        _, errors = await script.communicate()
    assert script.returncode == 130
    *progress, last = errors.decode().splitlines()  # it may have come further before the signal
    assert all(line.endswith(" MB") for line in progress)
    assert last == "bench_transfer: interrupted; this is what was measured before"
    await until(lambda: not any(is_alive(pid) for pid in children))  # the last one notices its parent's end by itself
    assert shared_memory() <= before


def test_every_transport_that_can_be_named_has_a_yardstick() -> None:
    assert set(factory.TRANSPORTS) - {"loopback"} <= set(YARDSTICKS)
