"""bench_quantization.py: perplexity beside transformers', what it refuses, the whole script on a tiny real model."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench_quantization import main
from engine.native.load import load_native
from engine.native.packing import WeightFormat
from enginebench.quality import STEP_TOKENS, Predictions, predictions
from tests.end_to_end.tiny_model import save_tiny_model

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_quantization.py"
TOKENS = torch.randint(250, (STEP_TOKENS + 60,), generator=torch.Generator().manual_seed(0)).tolist()

needs_kernels = pytest.mark.skipif(load_native(1) is None, reason="this machine has no native kernels")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), head_dim=32)


def test_perplexity_is_transformers(model: Path) -> None:
    ids = torch.tensor([TOKENS])
    with torch.inference_mode():
        loss = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(input_ids=ids, labels=ids).loss
    found = predictions(model, TOKENS, None, 1)
    assert found.log_likelihoods.shape == found.likeliest.shape == (len(TOKENS) - 1,)
    assert found.perplexity == pytest.approx(math.exp(loss.item()), rel=1e-4)


@needs_kernels
def test_kinds_of_weights_come_near_each_other_and_are_told_apart(model: Path) -> None:
    exact, rounded, int8 = (predictions(model, TOKENS, weights, 1) for weights in (None, *WeightFormat))
    assert rounded.perplexity == pytest.approx(exact.perplexity, rel=0.05)
    assert int8.perplexity == pytest.approx(exact.perplexity, rel=0.05)
    assert not torch.equal(int8.log_likelihoods, rounded.log_likelihoods)
    assert rounded.agreement(exact) > 0.8


def test_agreement_is_the_share_of_equal_choices() -> None:
    one, other = (Predictions(torch.zeros(4), torch.tensor(chosen)) for chosen in ([1, 2, 3, 4], [1, 0, 3, 0]))
    assert one.agreement(other) == 0.5
    assert one.perplexity == 1


@pytest.mark.parametrize("arguments", [["--threads", "0"], ["--repeats", "x"]])
def test_a_wrong_argument_exits_2_and_names_it(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert arguments[0] in capsys.readouterr().err


def test_a_model_that_is_not_there_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", str(tmp_path / "absent.gguf")]) == 2
    assert "absent.gguf" in capsys.readouterr().err


@needs_kernels
@pytest.mark.slow
def test_the_script_measures_speed_and_quality(model: Path, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = [sys.executable, str(SCRIPT), "--model", str(model), "--threads", "1", "--repeats", "1"]
    script = subprocess.run(
        [*command, "--json", str(result)], capture_output=True, text=True, timeout=100, env={**os.environ}
    )
    assert script.returncode == 0, script.stderr
    values = {figure["name"]: figure["value"] for figure in json.loads(result.read_text())}
    timed = ("TPOT, batch 1", "TPOT, batch 8", "TPOT, batch 32", "prefill of 512 tokens")
    speeds = {f"{what}.{name}.1_threads" for what in timed for name in ("none", "int8")}
    kinds = ("float32", "bfloat16", "int8")
    assert set(values) == speeds | {f"{what}.{kind}" for what in ("perplexity", "agreement") for kind in kinds}
    assert all(math.isfinite(value) and value > 0 for value in values.values())
    assert values["agreement.bfloat16"] == 1
    assert "times faster" in script.stdout
