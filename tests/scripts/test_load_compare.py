"""load_test.py --compare: its workloads, its running streams, and the whole of it on a tiny real model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from common.config import load_config
from loadcompare.compare import Comparison
from loadcompare.contestants import Arena
from loadcompare.running_streams import Scenario, measure_streams
from loadcompare.table import comparison_tables
from loadcompare.workloads import LONG_PROMPT, MIX, SHAPES, named_workloads
from loadgen.arguments import Contestant
from loadgen.metrics import Judgement
from loadgen.record import Delta, RequestFailed
from loadgen.results import Results
from loadgen.session import Session
from loadgen.slo import Slo
from loadgen.sweep import Search
from loadgen.workload import ClosedLoop, PlannedRequest, Workload, plan
from tests.end_to_end.tiny_model import save_tiny_model

BASE = Workload(ClosedLoop(4), num_requests=30)
QUICK = Scenario(
    num_streams=2,
    stream_input_tokens=4,
    idle_s=0.2,
    num_prompts=3,
    prompt_tokens=9,
    prompt_every_s=0.05,
    vocab_size=200,
)


# ---------------------------------------------------------------- workloads


def test_each_workload_keeps_to_its_shape_and_the_mix_has_all_of_them() -> None:
    workloads = named_workloads(BASE)
    assert list(workloads) == [*(shape.name for shape in SHAPES), MIX]
    for shape in SHAPES:
        for row in workloads[shape.name].trace:
            assert shape.input_tokens.low <= row.input_tokens <= shape.input_tokens.high
            assert shape.output_tokens.low <= row.output_tokens <= shape.output_tokens.high
    are_long = [row.input_tokens >= LONG_PROMPT.input_tokens.low for row in workloads[MIX].trace]
    assert 0 < sum(are_long) < len(are_long) == 30


def test_no_prompt_of_one_workload_begins_like_one_of_another() -> None:
    beginnings = [
        tuple(request.prompt[:16]) for workload in named_workloads(BASE).values() for request in plan(workload)
    ]
    assert len(set(beginnings)) == len(beginnings) == 120


def test_every_contestant_gets_the_same_requests() -> None:
    first, second = named_workloads(BASE), named_workloads(BASE)
    assert all(list(plan(first[name])) == list(plan(second[name])) for name in first)


# ---------------------------------------------------------------- running streams


class OneWorker:
    """Streams a token every 2 ms, and stops all streams for 60 ms whenever a prompt comes, as one engine step would."""

    label = "one worker"

    def __init__(self, stream_tokens: int = 10_000, break_after: int | None = None) -> None:
        self._stream_tokens = stream_tokens
        self._break_after = break_after
        self._may_step = asyncio.Lock()
        self.num_streams_begun = 0
        self.num_open = 0

    async def connect(self) -> None: ...

    async def close(self) -> None: ...

    async def stream(self, request: PlannedRequest) -> AsyncGenerator[Delta, None]:
        self.num_open += 1
        try:
            if request.input_tokens == QUICK.prompt_tokens:
                async with self._may_step:
                    await asyncio.sleep(0.06)
                yield Delta(num_tokens=1, is_end=True)
                return
            self.num_streams_begun += 1
            for index in range(self._stream_tokens):
                if index == self._break_after:
                    raise RequestFailed("connection broken")
                await asyncio.sleep(0.002)
                async with self._may_step:
                    yield Delta(num_tokens=1)
        finally:
            self.num_open -= 1


async def test_gaps_beside_long_prompts_show_what_the_streams_felt() -> None:
    worker = OneWorker()
    streams = await measure_streams(QUICK, worker, timeout_s=10)
    assert len(streams.prompts) == len(streams.prompt_arrivals_s) == 3
    assert streams.prompt_arrivals_s[1] - streams.prompt_arrivals_s[0] == pytest.approx(0.05)
    assert sum(gap.seconds >= 0.055 for gap in streams.loaded) >= 3
    assert len(streams.idle) > 20
    assert all(gap.end_s > 0 for gap in (*streams.idle, *streams.loaded))
    assert worker.num_open == 0  # cancelled, not left running


async def test_a_stream_that_ends_is_replaced() -> None:
    worker = OneWorker(stream_tokens=20)
    await measure_streams(QUICK, worker, timeout_s=10)
    assert worker.num_streams_begun > 2 * QUICK.num_streams


async def test_a_stream_that_breaks_ends_the_measurement_and_the_other_streams() -> None:
    worker = OneWorker(break_after=10)
    with pytest.raises(RequestFailed, match="connection broken"):
        await measure_streams(QUICK, worker, timeout_s=10)
    assert worker.num_open == 0


# ---------------------------------------------------------------- the whole of it


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_both_systems_are_started_measured_and_set_side_by_side(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    config_path = tmp_path / "serve.yaml"
    pool = "{num_threads: 1, kv_cache_gib: 0.02}"
    config_path.write_text(f"model: {{source: {model}, name: tiny, dtype: float32}}\nprefill: {pool}\ndecode: {pool}\n")
    slo = Slo(ttft_s=0.5)
    results = Results(Judgement(slo))
    workloads = named_workloads(Workload(ClosedLoop(2), num_requests=2, vocab_size=250))
    comparison = Comparison(
        session=Session(results, Console(file=StringIO()), timeout_s=60, num_warmups=1),
        arena=Arena(load_config(config_path), over_grpc=True, model=None, api_key=None),
        workloads={name: workloads[name] for name in (LONG_PROMPT.name, MIX)},
        scenario=QUICK,
        objectives=(slo, Search(first_rate=20.0, max_runs=2)),
    )
    await comparison.measure_each([Contestant("colocated"), Contestant("disaggregated")])
    assert results.is_clean
    by_target = [(run.target, run.workload_name) for run in results.runs]
    names = (LONG_PROMPT.name, MIX)
    assert by_target == [(target, name) for target in ("colocated", "disaggregated") for name in names]
    for run in results.runs:
        assert len(run.records) == 2
        for record in run.records:
            assert record.timings is not None
            assert bool(record.timings.prefill_worker) is (run.target == "disaggregated")
    assert [len(swept.runs) for swept in results.sweeps] == [2, 2]
    console = Console(file=StringIO(), width=120)
    console.print(comparison_tables(results))
    text = console.file.getvalue()
    for words in ("disaggregated / colocated", "p99, ratio to alone", LONG_PROMPT.name, "goodput, requests/s"):
        assert words in text


async def test_a_server_that_runs_already_is_measured_over_http(openai_server) -> None:
    results = Results(Judgement())
    comparison = Comparison(
        session=Session(results, Console(file=StringIO()), timeout_s=20, num_warmups=1),
        arena=Arena(load_config(Path("serve.yaml")), over_grpc=False, model=None, api_key=None),
        workloads={MIX: named_workloads(Workload(ClosedLoop(2), num_requests=3))[MIX]},
        scenario=QUICK,
        objectives=None,
    )
    await comparison.measure_each([Contestant(openai_server.url, url=openai_server.url)])
    assert [run.target for run in results.runs] == [openai_server.url]
    assert len(results.runs[0].records) == len(results.streams[0].prompts) == 3
    assert results.is_clean
