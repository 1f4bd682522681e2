"""One line per request, for spreadsheets and notebooks."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from loadgen.record import RequestRecord
from loadgen.results import Results

STAGES = ("queue", "reserve", "prefill_queue", "prefill", "transfer", "decode_wait", "decode")  # common/lifecycle.py
Cell = str | int | float | bool | None


def write_csv(results: Results, path: Path) -> None:
    """Times are after the first request's planned arrival; latencies count from each one's own. Raises: OSError."""
    rows = list(_rows(results))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)


def _rows(results: Results) -> Iterator[dict[str, Cell]]:
    slo = results.judgement.slo
    for run in results.runs:
        start_s = min((record.scheduled_s for record in run.records), default=0.0)
        for record in sorted(run.records, key=lambda record: record.scheduled_s):
            is_good = None if slo is None else slo.is_met_by(record)
            yield {"workload": run.workload_name, "target": run.target, **_row(record, start_s), "is_good": is_good}


def _row(record: RequestRecord, start_s: float) -> dict[str, Cell]:
    timings = record.timings
    stages = {} if timings is None else timings.stages
    return {
        "scheduled_s": round(record.scheduled_s - start_s, 6),
        "sent_s": round(record.sent_s - start_s, 6),
        "input_len": record.input_tokens,
        "cached_len": record.cached_tokens,
        "output_len": record.output_tokens,
        "ttft_ms": _ms(record.ttft_s),
        "tpot_ms": _ms(record.tpot_s),
        "max_itl_ms": _ms(max(record.itl_s, default=None)),
        "e2el_ms": _ms(record.end_to_end_s),
        "error": None if record.failure is None else record.failure.kind,
        **{f"{stage}_ms": _ms(stages.get(stage)) for stage in STAGES},
        "prefill_worker": timings.prefill_worker if timings else None,
        "decode_worker": timings.decode_worker if timings else None,
        "attempts": timings.attempts if timings else None,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
