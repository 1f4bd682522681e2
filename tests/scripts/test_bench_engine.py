"""bench_engine.py: what its figures mean, what it refuses, and the whole script on a tiny real model."""

from __future__ import annotations

import ctypes
import json
import math
import os
import re
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from bench_engine import main
from bench_goal import Goal
from engine.model.config import ExpertsConfig, ModelConfig, RopeConfig
from engine.native.load import load_native
from enginebench.clock import Clock, share_outside_kernels, timed_library
from enginebench.figures import Figure, Run, figures_json, figures_of
from enginebench.goals import goals_for
from enginebench.limits import TorchProbe
from enginebench.measure import (
    DECODE_POINTS,
    PREFILL_LENGTHS,
    SAMPLING_POINTS,
    DecodePoint,
    DecodeSample,
    Pass,
    Prompts,
)
from enginebench.report import report_tables
from enginebench.threads import torch_threads
from enginebench.work import NumberBytes, step_work
from kernelbench.measure import Limits
from tests.end_to_end.tiny_model import save_tiny_model

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_engine.py"

BFLOAT16 = NumberBytes(weight=2, cached=2)
AGAINST_LIMITS = ("bytes", "operations", "read_share", "multiply_share")
KEYS = {"limit.read", "limit.multiply", "decode_8.context_cost"}
KEYS |= {f"prefill_{n}.{metric}" for n in PREFILL_LENGTHS for metric in ("rate", *AGAINST_LIMITS)}
KEYS |= {f"prefill_in_chunks_{n}.{metric}" for n in PREFILL_LENGTHS for metric in ("rate", "multiply_share")}
KEYS |= {
    f"sampling_{kind}_{rows}.{metric}"
    for kind in ("greedy", "temperature", "top_p", "top_k")
    for rows in (1, 32)
    for metric in ("row_time", "step_share")
}
KEYS |= {
    f"decode_{batch}x{context}.{metric}"
    for batch in (1, 4, 8, 16, 32)
    for context in (64, 1024)
    for metric in ("tpot", "rate", "python_share", "python_time", *AGAINST_LIMITS)
}
KEYS |= {"transformers.prefill_512.rate", "transformers.prefill_512.times_faster"}
KEYS |= {"transformers.decode_1x64.tpot", "transformers.decode_1x64.times_faster"}


def model(**changes: object) -> ModelConfig:
    """q is wider than the model on purpose."""
    shape = {"vocab_size": 100, "hidden_size": 8, "intermediate_size": 10, "num_layers": 3, "num_heads": 16}
    shape |= {"num_kv_heads": 4, "head_dim": 2, "max_position_embeddings": 4096, "eos_token_ids": ()}
    flags = {"tie_word_embeddings": True, "attention_bias": False, "attention_output_bias": False}
    return ModelConfig(**{"rms_norm_eps": 1e-5, "rope": RopeConfig(1e4), **shape, **flags, **changes})


def one_pass(scale: float = 1.0, share: float = 0.25) -> Pass:
    """At scale 1 a prompt takes 1 ms a token and a decode step 10 ms, 20 ms with the long context."""
    prefill_s = {n: scale * n * 1e-3 for n in PREFILL_LENGTHS}
    decode = {p: DecodeSample(scale * (0.01 if p.context == 64 else 0.02), share) for p in DECODE_POINTS}
    chunked_s = {n: 2 * seconds for n, seconds in prefill_s.items()}
    sampling_s = {p: scale * p.rows * 1e-5 for p in SAMPLING_POINTS}
    return Pass(
        prefill_s, chunked_s, decode, sampling_s, reference_prefill_s=1.024 * scale, reference_step_s=0.04 * scale
    )


def run(*passes: Pass, num_threads: int = 2, has_goals: bool = True) -> Run:
    return Run(model(), BFLOAT16, num_threads, Limits(1e6, 1e9), passes or (one_pass(),), has_goals)


def by_key(figures: list[Figure]) -> dict[str, Figure]:
    return {figure.key: figure for figure in figures}


# ---------------------------------------------------------------- work


def test_a_decode_step_reads_every_weight_once_and_every_cached_token() -> None:
    layer = 8 * (16 + 4 + 4) * 2 + 16 * 2 * 8 + 3 * 8 * 10
    weights = 3 * layer + 100 * 8
    kv = 3 * 2 * 4 * 2  # numbers per token
    work = step_work(model(), BFLOAT16, [(1, 50), (1, 7)])
    assert work.num_bytes == 2 * (weights + 57 * kv)
    assert work.num_operations == 2 * 2 * weights + 3 * 4 * 16 * 2 * 57


def test_int8_weights_are_half_the_bytes_and_the_cache_is_not() -> None:
    one, two = (step_work(model(), NumberBytes(weight, cached=2), [(1, 50)]) for weight in (1, 2))
    kv = 2 * 3 * 2 * 4 * 2 * 50
    assert one.num_bytes - kv == (two.num_bytes - kv) / 2
    assert one.num_operations == two.num_operations


def test_a_prompt_attends_to_half_a_square_and_needs_one_row_of_logits() -> None:
    whole = step_work(model(), BFLOAT16, [(8, 8)])
    layer = 8 * (16 + 4 + 4) * 2 + 16 * 2 * 8 + 3 * 8 * 10
    assert whole.num_operations == 2 * (8 * 3 * layer + 800) + 3 * 4 * 16 * 2 * 36


def test_chunks_do_the_operations_of_the_whole_prompt_and_read_the_weights_each() -> None:
    config = model(windows=(3, None, 5))
    whole = step_work(config, BFLOAT16, [(8, 8)])
    chunks = [step_work(config, BFLOAT16, [(4, 4)]), step_work(config, BFLOAT16, [(4, 8)])]
    logits = 2 * 800
    assert sum(chunk.num_operations for chunk in chunks) == whole.num_operations + logits
    assert sum(chunk.num_bytes for chunk in chunks) > 1.5 * whole.num_bytes


def test_a_window_bounds_what_is_read_and_multiplied() -> None:
    wide, narrow = (step_work(model(windows=windows), BFLOAT16, [(1, 1000)]) for windows in ((), (10, 10, 10)))
    assert wide.num_bytes - narrow.num_bytes == 2 * 3 * 2 * 990 * 4 * 2
    assert wide.num_operations - narrow.num_operations == 3 * 4 * 990 * 16 * 2


def test_a_token_is_multiplied_by_its_own_experts_alone() -> None:
    experts = ExpertsConfig(num_experts=4, num_active=2, intermediate_size=16, is_renormalised=True)
    config = model(experts=experts, num_layers=1)
    one, many = step_work(config, BFLOAT16, [(1, 1)]), step_work(config, BFLOAT16, [(9, 9)])
    expert, router = 3 * 8 * 16, 8 * 4
    attention = 8 * (16 + 4 + 4) * 2 + 16 * 2 * 8
    assert one.num_bytes == 2 * (800 + attention + router + 2 * expert + 2 * 4 * 2)
    assert many.num_bytes == 2 * (800 + attention + router + 4 * expert + 2 * 9 * 4 * 2)
    assert many.num_operations == 2 * (9 * (attention + router + 2 * expert) + 800) + 4 * 16 * 2 * 45


# ---------------------------------------------------------------- figures


def test_every_figure_is_a_median_over_the_passes() -> None:
    figures = by_key(figures_of(run(one_pass(9.0, 0.5), one_pass(1.0, 0.25), one_pass(0.5, 0.125))))
    assert set(figures) == KEYS
    values = {key: figure.value for key, figure in figures.items()}
    assert values["prefill_512.rate"] == pytest.approx(1000)
    assert values["prefill_in_chunks_512.rate"] == pytest.approx(500)
    assert values["prefill_in_chunks_512.multiply_share"] == pytest.approx(values["prefill_512.multiply_share"] / 2)
    assert values["sampling_top_p_32.row_time"] == pytest.approx(0.01)
    assert values["sampling_top_p_32.step_share"] == pytest.approx(0.032)
    assert values["sampling_top_p_1.step_share"] == pytest.approx(0.001)
    assert values["decode_8x64.tpot"] == pytest.approx(10)
    assert values["decode_8x64.rate"] == pytest.approx(800)
    assert values["decode_8x64.python_share"] == 0.25
    assert values["decode_8x64.python_time"] == pytest.approx(2.5)
    assert values["transformers.prefill_512.rate"] == pytest.approx(500)
    assert values["transformers.prefill_512.times_faster"] == pytest.approx(2)
    assert values["transformers.decode_1x64.tpot"] == pytest.approx(40)
    assert values["transformers.decode_1x64.times_faster"] == pytest.approx(4)


def test_shares_are_of_the_limits_of_the_same_run() -> None:
    values = {key: figure.value for key, figure in by_key(figures_of(run())).items()}
    assert values["decode_1x64.read_share"] == pytest.approx(values["decode_1x64.bytes"] / 0.01 / 1e6)
    assert values["prefill_512.multiply_share"] == pytest.approx(values["prefill_512.operations"] / 0.512 / 1e9)
    assert (values["limit.read"], values["limit.multiply"]) == (0.001, 1.0)


def test_a_longer_context_costs_its_extra_time_over_the_time_to_read_its_kv() -> None:
    extra_kv_s = 8 * 960 * (3 * 2 * 4 * 2 * 2) / 1e6
    assert by_key(figures_of(run()))["decode_8.context_cost"].value == pytest.approx(0.01 / extra_kv_s)


def test_goals_depend_on_the_number_of_threads_and_are_for_one_model() -> None:
    assert {key for key, figure in by_key(figures_of(run())).items() if figure.goal} == set(goals_for(2))
    assert set(goals_for(2)) < KEYS
    assert goals_for(1)["prefill_in_chunks_512.rate"] == goals_for(1)["prefill_512.rate"] == Goal(">=", 750)
    assert (goals_for(1)["prefill_2048.rate"], goals_for(2)["prefill_2048.rate"]) == (
        Goal(">=", 650),
        Goal(">=", 1300),
    )
    assert goals_for(3) == {}
    assert not any(figure.goal for figure in figures_of(run(has_goals=False)))


def test_a_goal_may_be_met_exactly() -> None:
    assert [Goal("<=", 15).holds(value) for value in (14.0, 15.0, 16.0)] == [True, True, False]
    assert [Goal(">=", 0.7).holds(value) for value in (0.6, 0.7, 0.8)] == [False, True, True]


def test_json_names_the_threads_and_says_what_holds() -> None:
    records = {record["name"]: record for record in figures_json(figures_of(run(num_threads=1)))}
    assert records["decode_1x64.tpot.1_threads"] == {
        "name": "decode_1x64.tpot.1_threads",
        "value": pytest.approx(10),
        "unit": "ms",
        "goal": "<= 15",
        "holds": True,
    }
    assert records["decode_4x64.tpot.1_threads"]["goal"] is None
    assert records["decode_4x64.tpot.1_threads"]["holds"] is None


def test_tables_fit_eighty_columns_and_line_up() -> None:
    console = Console(file=StringIO(), width=80)
    shape = {"hidden_size": 576, "intermediate_size": 1536, "num_layers": 30, "num_heads": 9, "num_kv_heads": 3}
    smollm = model(vocab_size=49152, head_dim=64, **shape)
    for table in report_tables(figures_of(Run(smollm, BFLOAT16, 2, Limits(25e9, 466e9), [one_pass(scale=10.0)], True))):
        console.print(table)
    output = console.file.getvalue()
    assert "…" not in output
    rows = [line.rstrip() for line in output.splitlines() if re.match(r" \d+ × [\d,]+  ", line)]
    assert len(rows) == len(DECODE_POINTS)
    assert {len(row) for row in rows} == {len(rows[0])}
    assert rows[-1].startswith(" 32 × 1,024 ")


# ---------------------------------------------------------------- measuring


def test_prompts_never_share_a_block() -> None:
    prompts = Prompts(vocab_size=258)
    beginnings = [tuple(prompts.next(64)[:16]) for _ in range(500)]
    assert len(set(beginnings)) == 500
    assert all(0 <= token < 258 for beginning in beginnings for token in beginning)


def test_a_point_stands_for_the_middle_of_its_timed_steps() -> None:
    assert DecodePoint(8, 64).seq_len == 64 + 2 + 8.5


def test_calls_into_the_library_are_timed_and_then_left_as_they_were() -> None:
    def kernels_nap() -> str:
        time.sleep(0.01)
        return "slept"

    library = SimpleNamespace(kernels_nap=kernels_nap, other=time.sleep)
    clock = Clock()
    with timed_library(SimpleNamespace(_library=library), clock):
        assert library.kernels_nap() == "slept"
        library.other(0.001)
    assert library.kernels_nap is kernels_nap
    assert library.other is time.sleep
    assert clock.elapsed_s >= 0.01
    spent_s = clock.elapsed_s
    library.kernels_nap()
    assert clock.elapsed_s == spent_s


def test_time_in_torch_is_told_from_time_in_python() -> None:
    x = torch.ones(512, 512)

    def mostly_torch() -> None:
        for _ in range(5):
            x @ x

    def mostly_python() -> None:
        x @ x
        time.sleep(0.2)

    assert share_outside_kernels(mostly_torch, None) < 0.2
    assert share_outside_kernels(mostly_python, None) > 0.5


@pytest.mark.skipif(load_native(1) is None, reason="this machine has no native kernels")
def test_time_in_the_native_library_is_told_from_the_rest() -> None:
    kernels = load_native(1)
    assert kernels is not None
    data = torch.ones(64 << 20, dtype=torch.uint8)
    assert share_outside_kernels(lambda: kernels.read_memory(data), load_native(1)) < 0.2
    assert isinstance(kernels._library, ctypes.CDLL)
    assert not any(function.__class__ is type(main) for function in vars(kernels._library).values())


def test_limits_are_measured_where_there_are_no_kernels() -> None:
    probe = TorchProbe(torch.float32, 1)
    probe.run(1)
    first = probe.limits
    probe.run(2)
    assert 1e8 < first.read_bytes_per_s <= probe.limits.read_bytes_per_s
    assert 1e8 < first.operations_per_s <= probe.limits.operations_per_s


def test_torch_gets_its_threads_back() -> None:
    before = torch.get_num_threads()
    with torch_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


# ---------------------------------------------------------------- the whole script


@pytest.mark.parametrize(
    "arguments", [["--threads", "0"], ["--threads", "1,a"], ["--repeats", "0"], ["--json", "/absent/x.json"]]
)
def test_a_wrong_argument_exits_2_and_names_it(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert arguments[0] in capsys.readouterr().err


def test_a_model_that_is_not_there_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", str(tmp_path / "absent.gguf")]) == 2
    assert "absent.gguf" in capsys.readouterr().err


def start_script(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    tiny = ("--model", str(save_tiny_model(folder / "model")), "--dtype", "float32", "--attention", "cpu")
    command = [sys.executable, str(SCRIPT), *tiny, "--threads", "1", "--repeats", "1", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env={**os.environ, "COLUMNS": "80"})


@pytest.mark.slow
def test_the_script_measures_every_figure(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    script = start_script(tmp_path, "--kv-cache-gib", "0.05", "--json", str(result))
    assert script.returncode == 0, script.stderr
    figures = {figure["name"]: figure for figure in json.loads(result.read_text())}
    assert set(figures) == {f"{key}.1_threads" for key in KEYS}
    for name, figure in figures.items():
        assert set(figure) == {"name", "value", "unit", "goal", "holds"}
        assert math.isfinite(figure["value"])
        if "context_cost" not in name:  # a difference: it may be nothing
            assert figure["value"] > 0, name
        assert (figure["goal"], figure["holds"]) == (None, None)
        if name.endswith("python_share.1_threads"):
            assert figure["value"] < 1
    assert script.stdout.startswith("1 thread(s), limits: ")
    assert "…" not in script.stdout


@pytest.mark.slow
def test_a_cache_that_is_too_small_is_refused_by_name(tmp_path: Path) -> None:
    script = start_script(tmp_path, "--kv-cache-gib", "0.01")
    assert script.returncode == 2
    assert "--kv-cache-gib" in script.stderr
