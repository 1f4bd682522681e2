"""Measures a serving endpoint under load, as its clients see it.

python scripts/load_test.py --url http://127.0.0.1:8000 --rate 4 --num-requests 200 --input-tokens 128:1024
python scripts/load_test.py --grpc 127.0.0.1:8001 --concurrency 16 --duration 60 --json result.json
python scripts/load_test.py --url http://a:8000 --url http://b:8000 --trace azure.csv --max-model-len 8192
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from rich.console import Console

from loadgen.grpc_target import GrpcTarget
from loadgen.http_target import HttpTarget
from loadgen.metrics import summarize
from loadgen.options import Options, TargetAddress, parse_options
from loadgen.progress import RunView, shown
from loadgen.record import Target, Unreachable
from loadgen.report import comparison_json, comparison_report, single_report, summary_json
from loadgen.runner import clock, measure, run
from loadgen.workload import ClosedLoop, Poisson, Replay, Workload, plan

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(arguments)
    views: list[RunView] = []  # outlives an interrupt, so that what was measured is still reported
    try:
        asyncio.run(_run_each(options, views, Console(stderr=True)))
    except Unreachable as error:
        print(f"load_test: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("load_test: interrupted; this is what was measured", file=sys.stderr)
        _report(options, views)
        return EXIT_INTERRUPTED
    _report(options, views)
    is_clean = all(record.is_completed for view in views for record in view.records)
    return 0 if is_clean else EXIT_FAILED


async def _run_each(options: Options, views: list[RunView], console: Console) -> None:
    """The same schedule on each target in turn."""
    targets = [_target(address, options) for address in options.targets]
    try:
        for target in targets:
            await target.connect()
        for target in targets:
            await _warm_up(target, options)
            view = RunView(target.label, options.workload.num_planned, clock)
            views.append(view)
            async with shown(view, console):
                await run(options.workload, target, options.timeout_s, view)
    finally:
        for target in targets:
            await target.close()


async def _warm_up(target: Target, options: Options) -> None:
    """Requests like the measured ones, but with prompts of their own, so that they warm no prefix cache."""
    warmups = replace(
        options.workload,
        pacing=ClosedLoop(1),
        seed=options.workload.seed + 1,
        num_requests=options.num_warmups,
        duration_s=None,
    )
    for request in plan(warmups):
        await measure(request, target, clock(), options.timeout_s)


def _target(address: TargetAddress, options: Options) -> Target:
    api_key = os.environ.get("OPENAI_API_KEY")
    if address.is_grpc:
        return GrpcTarget(address.address, options.model, api_key, options.tls.grpc)
    return HttpTarget(address.address, options.endpoint, options.model, api_key, options.tls.https)


def _report(options: Options, views: list[RunView]) -> None:
    labels = [view.label for view in views]
    summaries = [summarize(view.records) for view in views]
    console = Console()
    if len(views) == 2:
        console.print(comparison_report((labels[0], labels[1]), (summaries[0], summaries[1])))
    elif len(views) == 1:
        console.print(single_report(labels[0], summaries[0]))
    if options.json_path is None or not views:
        return
    run_facts = _run_facts(options.workload)
    results = [summary_json(label, summary, run_facts) for label, summary in zip(labels, summaries, strict=True)]
    result = comparison_json(results[0], results[1]) if len(results) == 2 else results[0]
    options.json_path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _run_facts(workload: Workload) -> dict[str, Any]:
    """What was asked for, in `vllm bench serve`'s words."""
    pacing = workload.pacing
    match pacing:
        case Poisson(rate) if rate < math.inf:
            request_rate: float | str = rate
        case Replay():
            request_rate = "trace"
        case _:
            request_rate = "inf"
    return {
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        "num_prompts": workload.num_planned,
        "request_rate": request_rate,
        "max_concurrency": pacing.concurrency if isinstance(pacing, ClosedLoop) else None,
        "seed": workload.seed,
    }


if __name__ == "__main__":
    sys.exit(main())
