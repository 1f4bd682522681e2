"""gpu_check without a GPU: its checks run on the CPU, small, and its judgement is put to the test."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import gpu_check
from common.engine_config import EngineConfig
from common.errors import PeerLost
from engine.attention.base import AttentionMetadata
from engine.attention.torch_reference import TorchReferenceAttention
from engine.build import assemble_engine
from gpucheck import sampling, transfer
from gpucheck.attention import Shape, check_attention, largest_error
from gpucheck.figures import Figure, at_least, at_most, plain, skipped
from gpucheck.generation import check_generation
from gpucheck.random_llama import Cost, llama3_8b, load_random, tiny_llama
from gpucheck.sampling import check_sampling
from gpucheck.speed import Load, Speed
from gpucheck.timing import Limits, measure_limits
from gpucheck.transfer import check_transfer
from tests.engine.test_cuda_graphs import Rerun

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
SHAPE = Shape(((1, 5), (1, 40), (9, 20)), 16, num_heads=4, num_kv_heads=2, head_dim=16)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without one")
def test_a_machine_without_a_gpu_is_told_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([]) == 2
    assert capsys.readouterr().out.splitlines() == ["gpu_check: no CUDA device here: nothing to check"]


def test_a_figure_says_whether_its_goal_holds() -> None:
    assert [at_least("a", 2, "x", 2).holds, at_least("a", 1, "x", 2).holds] == [True, False]
    assert [at_most("a", 2, "x", 2).holds, at_most("a", float("nan"), "x", 2).holds] == [True, False]
    assert str(at_least("share", 0.5, "of it", 0.7)).split() == [
        "MISS",
        "share",
        "0.5",
        "of",
        "it",
        "goal",
        ">=",
        "0.7",
    ]
    assert str(skipped("a", "no GPU")).split() == ["skip", "a:", "no", "GPU"]


def test_a_check_that_raises_keeps_what_it_had_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def check() -> Iterator[Figure]:
        yield plain("first", 1, "x")
        raise RuntimeError("out of memory")

    found = gpu_check.run_here("speed", check(), tmp_path / "figures.json")
    assert [(figure.name, figure.holds) for figure in found] == [("first", None), ("speed_check", False)]
    assert "out of memory" in capsys.readouterr().out
    saved = json.loads((tmp_path / "figures.json").read_text())
    assert [sorted(fields) for fields in saved] == [["goal", "holds", "name", "unit", "value"]] * 2


def in_a_process(then: str) -> list[str]:
    save = (
        "import pathlib, sys, time; pathlib.Path(sys.argv[2]).write_text("
        '\'[{"name": "a", "value": 1.0, "unit": "x", "goal": null, "holds": null}]\'); '
    )
    return [sys.executable, "-c", save + then]


@pytest.mark.parametrize(
    ("then", "ending"),
    [
        ("sys.exit(0)", []),
        ("sys.exit(1)", []),
        ("sys.exit(134)", ["its process ended with status 134"]),
        ("time.sleep(60)", ["not done within 2 s"]),
    ],
)
def test_the_figures_of_a_process_are_kept_however_it_ends(then: str, ending: list[str]) -> None:
    figures = gpu_check.run_apart("transfer", in_a_process(then), timeout_s=2)
    assert figures[0] == plain("a", 1.0, "x")
    assert [figure.unit for figure in figures[1:]] == ending
    assert all(figure.holds is False for figure in figures[1:])


def test_a_process_that_saves_nothing_has_failed() -> None:
    (figure,) = gpu_check.run_apart("speed", [sys.executable, "-c", "raise SystemExit(3)"])
    assert (figure.name, figure.holds) == ("speed_check", False)


def test_attention_is_checked_where_it_can_run_and_skipped_with_a_reason_elsewhere() -> None:
    figures = list(check_attention(CPU, {"mixed": SHAPE}, {"more": SHAPE}))
    by_name = {figure.name: figure for figure in figures}
    triton = [figure for figure in figures if figure.name.startswith("attention_triton")]
    assert len(triton) == 6
    assert all(figure.holds for figure in triton)
    assert by_name["attention_torch_varlen_bfloat16"].value is None
    assert "CUDA" in by_name["attention_torch_varlen_bfloat16"].unit


def test_an_attention_that_is_wrong_shows() -> None:
    def forgetful(query: Tensor, keys: Tensor, values: Tensor, metadata: AttentionMetadata, scale: float) -> Tensor:
        return TorchReferenceAttention()(query, keys, values.roll(1, dims=0), metadata, scale)

    assert largest_error(TorchReferenceAttention(), SHAPE, torch.float32, CPU) == 0
    assert largest_error(forgetful, SHAPE, torch.float32, CPU) > 0.1


def test_sampled_tokens_that_differ_from_the_cpus_show(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"sampled_{name}_as_on_the_cpu" for name in ("plain", "top_k", "top_p", "both")]
    assert [(f.name, f.holds) for f in check_sampling(CPU, num_rows=3, vocab_size=500)] == [(n, True) for n in names]
    seeds = iter(range(100))  # another one for each call, as a stream of random numbers would be
    monkeypatch.setattr(sampling, "sample", lambda logits, params, positions: torch.full((len(params),), next(seeds)))
    assert [f.holds for f in check_sampling(CPU, num_rows=3, vocab_size=500)] == [False] * 4


def test_generation_through_graphs_agrees_with_the_reference() -> None:
    figures = list(check_generation(CPU, Rerun, max_tokens=3))
    assert [figure.name for figure in figures] == [
        "greedy_answers_eager_as_reference",
        "greedy_answers_cuda_graphs_as_reference",
    ]
    assert all(figure.holds for figure in figures)


def test_a_transfer_is_checked_number_by_number() -> None:
    figures = list(check_transfer(CPU, CPU, ("loopback", "torch_dist"), num_tokens=10))
    assert [(figure.name, figure.value) for figure in figures if figure.goal] == [
        ("transfer_loopback_wrong_numbers", 0),
        ("transfer_torch_dist_wrong_numbers", 0),
    ]
    assert all(figure.holds is not False for figure in figures)


@pytest.mark.parametrize(
    ("transport", "destination", "is_skipped"),
    [("torch_dist", CUDA, True), ("torch_dist", torch.device("cuda:1"), False), ("grpc", CUDA, False)],
)
def test_only_nccl_on_one_gpu_may_be_skipped(
    transport: str, destination: torch.device, is_skipped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object) -> tuple[int, float]:
        raise PeerLost("duplicate GPU")

    monkeypatch.setattr(transfer, "_transfer", refuse)
    (figure,) = check_transfer(CUDA, destination, (transport,), num_tokens=10)
    assert (figure.value is None, figure.holds) == (is_skipped, None if is_skipped else False)


def test_the_cost_of_a_step_of_llama3_8b() -> None:
    cost = Cost(llama3_8b(), bytes_per_number=2)
    assert cost.layer_weights + 2 * cost.head_weights == pytest.approx(8.03e9, rel=1e-3)  # parameters, norms aside
    assert cost.decode_bytes(0, 0) == pytest.approx(15.0e9, rel=0.01)
    assert cost.decode_bytes(2, 100) - cost.decode_bytes(0, 0) == 2 * 100 * 131072
    assert cost.prefill_flops(1000) == pytest.approx(2 * cost.layer_weights * 1000, rel=0.05)


def test_speed_is_measured_against_the_limits() -> None:
    model = tiny_llama()
    config = EngineConfig(Path("random"), device="cpu", attention="cpu", block_size=16, kv_cache_bytes=4 << 20)
    engine = assemble_engine(load_random(model, torch.float32, CPU, std=0.2), config, CPU)
    limits = Limits(read_bytes_per_s=1.0, flops_per_s=1e30)
    load = Load(prefill_tokens=(20,), decode_batches=(1, 3, 1000), decode_context=20, num_steps=3, num_prompts=1)
    figures = {figure.name: figure for figure in Speed(engine, Cost(model, 4), limits).figures(load)}
    assert figures["prefill_20"].value is not None
    assert figures["prefill_20"].value > 0
    assert figures["prefill_20_matrix_share"].holds is False
    assert figures["decode_3_read_share"].holds is True
    step_ms, rate = figures["decode_3_step"].value, figures["decode_3"].value
    assert step_ms is not None
    assert rate == pytest.approx(3 / step_ms * 1e3)
    assert figures["decode_1000"].value is None
    assert not engine.has_work
    assert engine.load().free_blocks == engine.load().total_blocks


def test_limits_are_positive_and_finite() -> None:
    limits = measure_limits(CPU, num_bytes=1 << 16, matrix_size=32)
    assert all(0 < value < float("inf") for value in (limits.read_bytes_per_s, limits.flops_per_s))


def test_random_weights_are_the_same_every_time() -> None:
    first, second = (load_random(tiny_llama(), torch.float32, CPU, std=0.2).model for _ in range(2))
    assert torch.equal(first.lm_head.weight, second.lm_head.weight)
