"""Request traces of real services: when requests came and how long they were.

.csv    TIMESTAMP,ContextTokens,GeneratedTokens           (Azure's LLM inference traces)
.jsonl  timestamp (ms), input_length, output_length, hash_ids   (Mooncake's traces)
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

HASH_BLOCK_TOKENS = 512  # tokens that one of Mooncake's hash ids stands for

_FIELDS = {
    ".csv": "TIMESTAMP,ContextTokens,GeneratedTokens",
    ".jsonl": "timestamp, input_length and output_length, maybe hash_ids",
}

Raw = TypeVar("Raw")


class TraceError(Exception):
    """The trace cannot be read; the message names the file, the line and what is wrong."""


@dataclass(frozen=True)
class TraceRow:
    timestamp_s: float  # after the trace's own zero
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()  # one per 512 prompt tokens; equal ids are equal tokens


def read_trace(path: Path, max_model_len: int | None = None) -> tuple[TraceRow, ...]:
    """Rows in order of time, without those whose prompt and answer together pass `max_model_len` tokens.

    Raises: TraceError.
    """
    readers = {".csv": _read_csv, ".jsonl": _read_jsonl}
    if path.suffix not in readers:
        raise TraceError(f"{path}: a trace is a .csv or a .jsonl file")
    try:
        rows = list(readers[path.suffix](path))
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"cannot read the trace {path}: {error}") from error
    rows = [row for row in rows if max_model_len is None or row.input_tokens + row.output_tokens <= max_model_len]
    if not rows:
        raise TraceError(f"{path} holds no request" + (f" of at most {max_model_len} tokens" if max_model_len else ""))
    return tuple(sorted(rows, key=lambda row: row.timestamp_s))


def spread_in_bins(rows: Sequence[TraceRow], bin_s: float, seed: int) -> tuple[TraceRow, ...]:
    """The same requests, those of each time bin spread over it at random.

    A trace whose clock ticks every few seconds would otherwise send all of a tick's requests at once, which its
    service never saw. Requests keep their order, and stay in their bin.
    """
    rng = np.random.default_rng(seed)
    spread: list[TraceRow] = []
    for index, grouped in groupby(rows, key=lambda row: math.floor(row.timestamp_s / bin_s)):
        group = list(grouped)
        moments = np.sort(rng.uniform(index * bin_s, (index + 1) * bin_s, size=len(group)))
        spread += [replace(row, timestamp_s=float(now_s)) for row, now_s in zip(group, moments, strict=True)]
    return tuple(spread)


def _read_csv(path: Path) -> Iterator[TraceRow]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        for row in reader:
            yield _parsed(path, reader.line_num, row, _azure_row)


def _read_jsonl(path: Path) -> Iterator[TraceRow]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _parsed(path, number, line, _mooncake_row)


def _parsed(path: Path, line: int, raw: Raw, parse: Callable[[Raw], TraceRow]) -> TraceRow:
    try:
        row = parse(raw)
    except KeyError as error:
        raise TraceError(f"{path}, line {line}: no field {error}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise TraceError(f"{path}, line {line}: {error}; a line has {_FIELDS[path.suffix]}") from error
    if min(row.input_tokens, row.output_tokens) < 1:
        raise TraceError(f"{path}, line {line}: lengths must be at least 1")
    return row


def _azure_row(raw: dict[str, str]) -> TraceRow:
    when = datetime.fromisoformat(raw["TIMESTAMP"])
    timestamp_s = (when.replace(tzinfo=None) - datetime(1970, 1, 1)).total_seconds()
    return TraceRow(timestamp_s, int(raw["ContextTokens"]), int(raw["GeneratedTokens"]))


def _mooncake_row(line: str) -> TraceRow:
    raw: dict[str, Any] = json.loads(line)
    row = TraceRow(
        raw["timestamp"] / 1000, int(raw["input_length"]), int(raw["output_length"]), tuple(raw.get("hash_ids", ()))
    )
    if row.hash_ids and len(row.hash_ids) * HASH_BLOCK_TOKENS < row.input_tokens:
        raise ValueError(f"{len(row.hash_ids)} hash_ids do not cover {row.input_tokens} tokens")
    return row
