"""Measures a serving endpoint under load, as its clients see it.

python scripts/load_test.py --url http://127.0.0.1:8000 --rate 4 --num-requests 200 --input-tokens 128:1024
python scripts/load_test.py --grpc 127.0.0.1:8001 --concurrency 16 --duration 60 --json result.json
python scripts/load_test.py --url http://a:8000 --url http://b:8000 --trace azure.csv --max-model-len 8192
python scripts/load_test.py --slo ttft:1,tpot:0.05 --sweep --input-tokens 64:512 --html report.html
python scripts/load_test.py --compare colocated,disaggregated --slo ttft:3,tpot:0.15 --html report.html
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence

from rich.console import Console

from cluster.deployment import until_signal
from cluster.supervisor import MemberGivenUp
from common.config import load_config
from common.errors import ConfigError, ServingError
from common.model_source import resolve_model
from loadcompare.compare import Comparison
from loadcompare.contestants import Arena
from loadcompare.running_streams import Scenario
from loadcompare.table import comparison_tables
from loadcompare.workloads import named_workloads
from loadgen.arguments import TargetAddress
from loadgen.csv_report import write_csv
from loadgen.grpc_target import GrpcTarget
from loadgen.http_target import HttpTarget
from loadgen.json_report import results_json
from loadgen.options import Options, parse_options
from loadgen.record import Target, Unreachable
from loadgen.report import comparison_report, single_report
from loadgen.results import Results
from loadgen.session import Session
from loadgen.sweep_report import sweep_report
from loadreport.chrome import results_trace
from loadreport.page import page
from servingbench.client import BenchFailed

MIN_WIDTH = 90  # of the tables, also where the output is no terminal
STREAMS_SEED = 500  # far from the workloads' seeds
EXIT_FAILED, EXIT_MISCONFIGURED = 1, 2
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """What was measured before a failure or an interrupt is still reported."""
    options = parse_options(arguments)
    results = Results(options.judgement)
    session = Session(results, Console(stderr=True), options.timeout_s, options.num_warmups)
    try:
        asyncio.run(_compare(options, session) if options.contestants else _measure_each(options, session))
        results.is_complete = True
    except ConfigError as error:
        print(f"load_test: {error}", file=sys.stderr)
        return EXIT_MISCONFIGURED
    except (Unreachable, MemberGivenUp, ServingError, BenchFailed) as error:
        print(f"load_test: {error}", file=sys.stderr)
        _report(options, results)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("load_test: interrupted; this is what was measured", file=sys.stderr)
        _report(options, results)
        return EXIT_INTERRUPTED
    _report(options, results)
    return 0 if results.is_clean else EXIT_FAILED


async def _measure_each(options: Options, session: Session) -> None:
    """The same schedule, or the same search, on each target in turn. Raises: Unreachable."""
    targets = [_target(address, options) for address in options.targets]
    try:
        for target in targets:
            await target.connect()
        for target in targets:
            if options.objectives is None:
                await session.measure("", options.workload, target)
            else:
                await session.sweep(options.workload, target, *options.objectives)
    finally:
        for target in targets:
            await target.close()


async def _compare(options: Options, session: Session) -> None:
    """Raises: as Comparison.measure_each."""
    config = load_config(options.config_path)
    resolve_model(config.model.source)  # so that no start waits for a download
    are_all_ours = all(contestant.url is None for contestant in options.contestants)
    comparison = Comparison(
        session=session,
        arena=Arena(config, are_all_ours, options.model, os.environ.get("OPENAI_API_KEY")),
        workloads=named_workloads(options.workload),
        scenario=Scenario(vocab_size=options.workload.vocab_size, seed=options.workload.seed + STREAMS_SEED),
        objectives=options.objectives,
    )
    has_ended = False

    async def to_the_end() -> None:
        nonlocal has_ended
        await comparison.measure_each(options.contestants)
        has_ended = True

    await until_signal(to_the_end())  # whatever ends this process, the systems that it started are stopped first
    if not has_ended:
        raise KeyboardInterrupt


def _target(address: TargetAddress, options: Options) -> Target:
    api_key = os.environ.get("OPENAI_API_KEY")
    if address.is_grpc:
        return GrpcTarget(address.address, options.model, api_key, options.tls.grpc)
    return HttpTarget(address.address, options.endpoint, options.model, api_key, options.tls.https)


def _report(options: Options, results: Results) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, MIN_WIDTH)
    if options.contestants and results.runs:
        console.print(comparison_tables(results))
    elif results.runs:
        labels, summaries = zip(*((run.target, run.summary(results.judgement)) for run in results.runs), strict=True)
        is_pair = len(labels) == 2
        console.print(comparison_report(labels, summaries) if is_pair else single_report(labels[0], summaries[0]))
    for swept in results.sweeps:
        console.print(sweep_report(swept, results.judgement))
    if results.is_empty:
        return
    if options.outputs.json is not None:
        options.outputs.json.write_text(json.dumps(results_json(results), indent=2) + "\n", encoding="utf-8")
    if options.outputs.csv is not None:
        write_csv(results, options.outputs.csv)
    if options.outputs.html is not None:
        options.outputs.html.write_text(page(results), encoding="utf-8")
    if options.outputs.chrome_trace is not None:
        options.outputs.chrome_trace.write_text(json.dumps(results_trace(results)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
