"""Results as JSON. Fields that `vllm bench serve` has too carry its names and units."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

from loadgen.fields import COUNTS, LATENCIES, RATES, distribution_of, ratio, statistic_names, statistics_of
from loadgen.metrics import Judgement, Summary, summarize
from loadgen.results import Results, Run, StreamsRun, SweepRun
from loadgen.workload import Burst, ClosedLoop, Constant, Poisson, Replay, Workload

JsonObject = dict[str, Any]


def results_json(results: Results) -> JsonObject:
    """One run is a flat object, two of one workload are `targets` with `ratios`; a comparison has such `workloads`."""
    by_workload = {
        name: _runs_json([_run_json(run, results.judgement) for run in runs])
        for name, runs in results.by_workload.items()
    }
    result: JsonObject = {"is_complete": results.is_complete}
    result |= by_workload.get("", {"workloads": by_workload} if by_workload else {})
    if results.streams:
        result["running_streams"] = [_streams_json(streams, results.judgement) for streams in results.streams]
    if results.sweeps:
        result["sweeps"] = [_sweep_json(swept, results.judgement) for swept in results.sweeps]
    return result


def _runs_json(runs: list[JsonObject]) -> JsonObject:
    """Two runs: also second / first for every latency and rate that both have."""
    if len(runs) == 1:
        return runs[0]
    first, second = runs
    compared = [key for key in first if key.endswith(("_ms", "_throughput", "_goodput"))]
    return {"targets": runs, "ratios": {key: ratio(first[key], second[key]) for key in compared}}


def _run_json(run: Run, judgement: Judgement) -> JsonObject:
    return {"target": run.target, **_workload_json(run.workload), **summary_json(run.summary(judgement))}


def summary_json(summary: Summary) -> JsonObject:
    result: JsonObject = {
        "duration": summary.duration_s,
        **{key: getattr(summary, key) for _, key in (*COUNTS, *RATES)},
        "tokens_per_event": summary.tokens_per_event,
        "short_answers": summary.num_short,
        "p99_send_lag_ms": summary.send_lag_p99_ms,
        "errors_by_type": summary.errors,
        "request_goodput": summary.request_goodput,
        "slo_attainment": summary.slo_attainment,
    }
    for _, key, _ in LATENCIES:
        distribution = distribution_of(summary, key)
        result[f"std_{key}_ms"] = distribution.std if distribution else None
        result[f"median_{key}_ms"] = distribution.median if distribution else None
        values = statistics_of(distribution)
        result |= {f"{statistic}_{key}_ms": values.get(statistic) for statistic in statistic_names(summary)}
    return result


def _workload_json(workload: Workload) -> JsonObject:
    """What was asked for."""
    pacing = workload.pacing
    match pacing:
        case Poisson(rate) | Constant(rate) | Burst(rate) if rate < math.inf:
            request_rate: float | str = rate
        case Replay():
            request_rate = "trace"
        case _:
            request_rate = "inf"
    return {
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        "num_prompts": workload.num_planned,
        "request_rate": request_rate,
        "arrivals": type(pacing).__name__.lower(),
        "max_concurrency": pacing.concurrency if isinstance(pacing, ClosedLoop) else None,
        "seed": workload.seed,
    }


def _streams_json(streams: StreamsRun, judgement: Judgement) -> JsonObject:
    idle, loaded = streams.idle_ms(judgement), streams.loaded_ms(judgement)
    return {
        "target": streams.target,
        "num_streams": streams.num_streams,
        "idle": {f"{statistic}_itl_ms": value for statistic, value in idle.items()},
        "loaded": {f"{statistic}_itl_ms": value for statistic, value in loaded.items()},
        "ratios": {f"{statistic}_itl_ms": ratio(value, loaded.get(statistic)) for statistic, value in idle.items()},
        "prompts": summary_json(summarize(streams.prompts, judgement)),
    }


def _sweep_json(swept: SweepRun, judgement: Judgement) -> JsonObject:
    sweep = swept.sweep
    judged = Judgement(swept.slo, judgement.percentiles)
    return {
        "target": swept.target,
        "slo": str(swept.slo),
        "goal": swept.goal,
        "highest_rate": sweep.highest_rate,
        "lowest_miss": sweep.lowest_miss,
        "rates": [{"request_rate": rate, **summary_json(summarize(records, judged))} for rate, records in swept.runs],
    }
