"""bench_policies.py on traces of our own making: the simulation's arithmetic, and the whole script."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path

import pytest

from bench_policies import main
from loadgen.trace import TraceRow
from policybench.cost import CostModel
from policybench.figures import trace_figures
from policybench.index_speed import measure_index
from policybench.job import BLOCK_SIZE, Job, jobs_of
from policybench.simulation import Pools, simulate
from router.policy import PolicyName

POOLS = Pools(num_prefill=3, num_decode=2, cache_tokens=100_000)


def row(at_s: float, *hash_ids: int, tail: int = 88, output: int = 100) -> TraceRow:
    """A prompt of whole blocks and a tail that it shares with nobody."""
    return TraceRow(at_s, BLOCK_SIZE * len(hash_ids) + tail, output, (*hash_ids, 10**9))


def replayed(rows: Iterable[TraceRow], pools: Pools = POOLS, policy: PolicyName = "kv_aware") -> list[Job]:
    jobs = list(jobs_of(rows, speed=1.0))
    simulate(jobs, pools, policy, seed=0)
    return jobs


def conversations(num_sessions: int, num_turns: int) -> list[TraceRow]:
    """Sessions that take turns; each prompt is the last one and six blocks more, after a common system prompt."""
    rng = random.Random(0)
    rows = []
    for session in range(num_sessions):
        at_s = rng.uniform(0, 20)
        for turn in range(num_turns):
            own = range(1000 * (session + 1), 1000 * (session + 1) + 6 * (turn + 1))
            rows.append(row(round(at_s, 3), 0, *own, output=rng.randint(20, 200)))
            at_s += rng.uniform(6, 14)
    return sorted(rows, key=lambda each: each.timestamp_s)


def test_an_idle_pair_takes_what_the_costs_say() -> None:
    first, again, other = replayed([row(5, 1, 2, 3), row(25, 1, 2, 3), row(45, 7, 8, 9)])
    cost = CostModel()
    assert first.arrival_s == 0
    assert [job.cached_tokens for job in (first, again, other)] == [0, 1536, 0]
    assert [job.moved_tokens for job in (first, again, other)] == [1624, 88, 1624]
    assert [first.ttft_s, other.ttft_s] == pytest.approx([cost.prefill(0, 1624)] * 2)
    assert again.ttft_s == pytest.approx(cost.prefill(1536, 88))
    assert first.tpot_s == pytest.approx(cost.step(1, 1624))


def test_prompts_wait_for_each_other_on_a_prefill_worker_and_answers_slow_each_other_down() -> None:
    one = Pools(1, 1, 100_000)
    first, second = replayed([row(0, 1, 2, output=1000), row(0, 3, 4, output=1000)], one)
    prefill_s = CostModel().prefill(0, 1112)
    assert (first.ttft_s, second.ttft_s) == (pytest.approx(prefill_s), pytest.approx(2 * prefill_s))
    assert first.tpot_s is not None
    assert CostModel().step(1, 1112) < first.tpot_s < CostModel().step(2, 2224)


def test_a_cache_of_bounded_size_forgets_the_least_recently_used() -> None:
    small = Pools(1, 1, 8 * BLOCK_SIZE)
    jobs = replayed([row(0, 1, 2, 3), row(20, 4, 5, 6), row(40, 7, 8, 9), row(60, 7, 8), row(80, 1, 2, 3)], small)
    # seven of the nine stay beside the last prompt's tail; 3 and 2 are gone, a prefix from its end
    assert [job.cached_tokens // BLOCK_SIZE for job in jobs] == [0, 0, 0, 2, 1]


def test_a_choice_knows_only_what_a_heartbeat_has_told() -> None:
    """All arrive before the first heartbeat after the prefix was computed: nobody can know where it is."""
    jobs = replayed([row(0, 1, 2), *(row(0.21, 1, 2) for _ in range(30))], Pools(3, 2, 100_000), "kv_aware")
    assert sum(job.cached_tokens == 0 for job in jobs) >= 2
    later = replayed([row(0, 1, 2), *(row(5 + 3 * n, 1, 2) for n in range(30))], Pools(3, 2, 100_000), "kv_aware")
    assert sum(job.cached_tokens == 0 for job in later) == 1


def test_without_hash_ids_nothing_is_reused() -> None:
    jobs = replayed([TraceRow(float(at), 2000, 50) for at in range(20)])
    assert {job.cached_tokens for job in jobs} == {0}
    assert {job.moved_tokens for job in jobs} == {2000}


def test_every_request_ends_under_overload_too() -> None:
    jobs = replayed([row(0.0, session, output=1 + session % 3) for session in range(300)], Pools(1, 1, 4000))
    assert all(job.ttft_s > 0 for job in jobs)
    assert [job.tpot_s is None for job in jobs] == [job.output_tokens == 1 for job in jobs]


def test_a_replay_is_the_same_each_time_it_is_made() -> None:
    rows = conversations(6, 3)
    assert [job.ttft_s for job in replayed(rows)] == [job.ttft_s for job in replayed(rows)]


def test_a_goal_is_set_where_prompts_share_something_and_says_whether_it_holds() -> None:
    def runs(*means: float) -> list[dict[str, tuple[float, str]]]:
        return [{"ttft_mean": (mean, "s"), "ttft_p99": (9.0, "s")} for mean in means]

    replays = {"least_loaded": runs(2.0, 3.0, 9.0), "kv_aware": runs(2.5, 1.0, 9.5)}
    holds = {figure.name: figure.holds for figure in trace_figures("t", replays, has_reuse=True)}
    assert holds == {
        "t.least_loaded.ttft_mean": None,
        "t.least_loaded.ttft_p99": None,
        "t.kv_aware.ttft_mean": True,  # 2.5 beside 3.0
        "t.kv_aware.ttft_p99": False,
    }
    assert all(figure.goal is None for figure in trace_figures("t", replays, has_reuse=False))


def test_the_index_is_measured() -> None:
    speed = measure_index(num_blocks=2048)
    assert 0 < speed.query_p50_s <= speed.query_p99_s
    assert min(speed.update_block_s, speed.leave_s) > 0


def test_kv_aware_beats_least_loaded_where_conversations_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mooncake, azure, result = tmp_path / "own.jsonl", tmp_path / "own.csv", tmp_path / "result.json"
    rows = conversations(num_sessions=40, num_turns=6)
    mooncake.write_text("".join(_mooncake_line(each) for each in rows))
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-02 00:00:01.5,374,44\n2024-01-02 00:00:01.7,9,1\n"
    )
    pools = ["--prefill", "4", "--decode", "2", "--cache-tokens", "400000", "--repeats", "1"]
    assert main(["--mooncake", str(mooncake), "--azure", str(azure), *pools, "--json", str(result)]) == 0
    figures = {figure["name"]: figure for figure in json.loads(result.read_text())}
    assert figures["mooncake.kv_aware.ttft_mean"]["holds"]
    assert figures["mooncake.kv_aware.ttft_p99"]["holds"]
    assert figures["mooncake.kv_aware.hit_rate"]["value"] > 1.3 * figures["mooncake.least_loaded.hit_rate"]["value"]
    assert figures["azure.kv_aware.hit_rate"]["value"] == 0
    assert {"index.query_p50", "index.query_p99", "azure.round_robin.ttft_mean"} <= set(figures)
    printed = capsys.readouterr().out
    assert "240 requests" in printed
    assert "least_loaded" in printed


@pytest.mark.parametrize("arguments", [["--prefill", "0"], ["--speed", "-1"], ["--speed", "fast"], ["--repeats", "x"]])
def test_a_wrong_argument_exits_2_and_names_it(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert arguments[0] in capsys.readouterr().err


def test_a_trace_that_is_not_there_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--mooncake", str(tmp_path / "absent.jsonl")]) == 2
    assert "absent.jsonl" in capsys.readouterr().err


def _mooncake_line(each: TraceRow) -> str:
    raw = {
        "timestamp": round(each.timestamp_s * 1000),
        "input_length": each.input_tokens,
        "output_length": each.output_tokens,
        "hash_ids": each.hash_ids,
    }
    return json.dumps(raw) + "\n"
