"""A load test as a trace for Perfetto: common/chrome_trace.py, with the stages as the clients' clock has them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from common.chrome_trace import JsonObject, TracedRequest, chrome_trace
from loadgen.record import RequestRecord
from loadgen.results import Results
from loadreport.timeline import stretches


def results_trace(results: Results) -> JsonObject:
    """Every request of every run, one run after the other. Where a server tells no stages, all is on one track."""
    traced = (_traced(run.records, run.workload_name, run.target) for run in results.runs)
    return chrome_trace([*chain.from_iterable(traced)])


def _traced(records: Sequence[RequestRecord], workload: str, target: str) -> list[TracedRequest]:
    in_order = sorted(records, key=lambda record: record.scheduled_s)
    return [_request(record, f"request {number}", workload, target) for number, record in enumerate(in_order, start=1)]


def _request(record: RequestRecord, name: str, workload: str, target: str) -> TracedRequest:
    timings = record.timings
    start_s = record.scheduled_s
    return TracedRequest(
        name=name,
        start_s=start_s,
        stages=[(each.stage, each.start_s - start_s, each.end_s - start_s) for each in stretches(record)],
        prefill_worker=timings.prefill_worker if timings else "",
        decode_worker=timings.decode_worker if timings else "",
        about={
            "target": target,
            "workload": workload,
            "input_len": record.input_tokens,
            "output_len": record.output_tokens,
            "error": record.failure.kind if record.failure else "",
        },
    )
