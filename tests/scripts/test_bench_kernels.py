"""The kernel bench runs, writes what it measured, and refuses what it cannot do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import bench_kernels
from engine.native.load import load_native


@pytest.mark.skipif(load_native(1) is None, reason="this machine has no native kernels")
def test_the_bench_writes_a_time_and_a_ratio_for_each_workload(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    try:
        arguments = ["--threads", "1", "--only", "elementwise", "--repeats", "3", "--json", str(tmp_path / "out.json")]
        assert bench_kernels.main(arguments) == 0
    finally:
        torch.set_num_threads(threads)
    figures = {figure["name"]: figure for figure in json.loads((tmp_path / "out.json").read_text())}
    assert figures["limit.read.1_threads"]["value"] > 0
    assert {name for name in figures if name.endswith(".time")} == {
        f"{kind}.{m}_rows.1_threads.time" for kind in ("rms_norm", "rotary_and_cache") for m in (1, 32, 512)
    }
    assert all(figure["value"] > 0 for figure in figures.values())


@pytest.mark.parametrize("arguments", [["--threads", "0"], ["--threads", "a"], ["--only", "nothing"]])
def test_the_bench_refuses_what_it_does_not_know(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_kernels.main(arguments)
    assert "is not a list of" in capsys.readouterr().err
