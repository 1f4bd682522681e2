"""The router's policies beside each other on a real trace in simulated time, and the speed of its prefix index.

python scripts/bench_policies.py                     the index alone
python scripts/bench_policies.py --mooncake conversation.jsonl
python scripts/bench_policies.py --azure conv.csv --prefill 2 --decode 2 --json result.json

Policies, index and room are the router's own; workers only cost time (policybench/cost.py). Nothing is measured but the
index, so a run gives the same table on any machine. The traces are not part of this project: Mooncake's is
jsonl with hash_ids of 512-token blocks, Azure's csv has lengths only, so that no two prompts share anything.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from rich.console import Console

from bench_arguments import above_zero, count, writable
from loadgen.trace import TraceError, TraceRow, read_trace
from policybench.figures import Figure, index_figures, replay_figures, trace_figures
from policybench.index_speed import NUM_BLOCKS, NUM_WORKERS, measure_index
from policybench.job import jobs_of
from policybench.report import goal_table, index_table, policy_table
from policybench.simulation import Pools, simulate
from router.policy import PolicyName

EXIT_MISCONFIGURED = 2
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)[::-1]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    console = Console(highlight=False, markup=False, width=100)
    pools = Pools(options.prefill, options.decode, options.cache_tokens)
    figures: list[Figure] = []
    for trace, path in (("mooncake", options.mooncake), ("azure", options.azure)):
        if path is not None:
            try:
                rows = read_trace(path, pools.longest_request)
            except TraceError as error:
                print(f"bench_policies: {error}", file=sys.stderr)
                return EXIT_MISCONFIGURED
            of_trace = _replayed(trace, rows, pools, options)
            title = f"{trace}: {len(rows):,} requests at {options.speed:g} × their rate, {_described(pools)}"
            console.print(policy_table(title, of_trace), "")
            figures += of_trace
    of_index = list(index_figures(measure_index()))
    console.print(index_table(f"{NUM_BLOCKS:,} blocks, {NUM_WORKERS} workers", of_index), "")
    figures += of_index
    console.print(goal_table(figures))
    if options.json is not None:
        text = json.dumps([figure.as_json() for figure in figures], indent=2)
        options.json.write_text(text + "\n", encoding="utf-8")
    return 0


def _replayed(trace: str, rows: Sequence[TraceRow], pools: Pools, options: argparse.Namespace) -> list[Figure]:
    replays: dict[str, list[dict[str, tuple[float, str]]]] = {}
    for policy in POLICIES:
        replays[policy] = []
        for seed in range(options.repeats):
            jobs = list(jobs_of(rows, options.speed))
            simulate(jobs, pools, policy, seed)
            replays[policy].append(replay_figures(jobs))
    return list(trace_figures(trace, replays, has_reuse=any(row.hash_ids for row in rows)))


def _described(pools: Pools) -> str:
    return f"{pools.num_prefill} + {pools.num_decode} workers of {pools.cache_tokens:,} tokens"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench_policies.py", description="The router's policies beside each other.")
    parser.add_argument("--mooncake", type=Path, metavar="FILE", help="a trace with hash_ids")
    parser.add_argument("--azure", type=Path, metavar="FILE", help="a trace of lengths")
    parser.add_argument("--prefill", type=count, default=8, metavar="N", help="workers; default: %(default)s")
    parser.add_argument("--decode", type=count, default=4, metavar="N", help="workers; default: %(default)s")
    parser.add_argument(
        "--cache-tokens",
        type=count,
        default=500_000,
        metavar="N",
        help="KV memory of each worker; longer requests are left out; default: %(default)s",
    )
    parser.add_argument("--speed", type=above_zero, default=1.0, metavar="X", help="of replay; default: %(default)s")
    parser.add_argument("--repeats", type=count, default=3, metavar="N", help="replays; default: %(default)s")
    parser.add_argument("--json", type=writable, metavar="FILE", help="also write the figures here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
