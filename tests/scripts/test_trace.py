from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.trace import TraceError, TraceRow, read_trace, spread_in_bins

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-01-02 23:59:59.9000000,374,44
2024-01-03 00:00:01.1500000,110,27
2024-01-03 00:00:00.4000000,4808,10"""  # unsorted, and no line feed at the end
MOONCAKE = """{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 14]}

{"timestamp": 1500, "input_length": 512, "output_length": 9, "hash_ids": [0]}
"""


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_azure_csv_is_read_in_order_of_time(tmp_path: Path, line_end: str) -> None:
    rows = read_trace(written(tmp_path, "trace.csv", AZURE.replace("\n", line_end)))
    assert [row.timestamp_s - rows[0].timestamp_s for row in rows] == pytest.approx([0, 0.5, 1.25])
    assert [(row.input_tokens, row.output_tokens) for row in rows] == [(374, 44), (4808, 10), (110, 27)]


def test_mooncake_jsonl_keeps_its_hash_ids(tmp_path: Path) -> None:
    rows = read_trace(written(tmp_path, "trace.jsonl", MOONCAKE))
    assert rows == (TraceRow(0.0, 600, 5, (0, 14)), TraceRow(1.5, 512, 9, (0,)))


def test_rows_too_long_for_the_model_are_left_out(tmp_path: Path) -> None:
    rows = read_trace(written(tmp_path, "trace.csv", AZURE), max_model_len=418)
    assert [row.input_tokens for row in rows] == [374, 110]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", AZURE.replace("110", "many"), "line 3: invalid literal"),
        ("a.csv", AZURE.replace("110", "0"), "line 3: lengths must be at least 1"),
        ("a.csv", AZURE.replace("2024-01-03 00:00:01.1500000", "soon"), "line 3: Invalid isoformat"),
        ("a.csv", AZURE.replace("ContextTokens", "Tokens"), "line 2: no field 'ContextTokens'"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no request"),
        ("a.csv", AZURE + "\n2024-01-03 00:00:09", "line 5"),
        ("a.jsonl", MOONCAKE + "{", "line 4: Expecting property name"),
        ("a.jsonl", MOONCAKE + "3", "line 4"),
        ("a.jsonl", MOONCAKE.replace("[0]", "[]").replace("[0, 14]", "[0]"), "line 1: 1 hash_ids do not cover"),
        ("a.jsonl", MOONCAKE.replace("input_length", "length"), "line 1: no field 'input_length'"),
        ("a.txt", AZURE, "a .csv or a .jsonl"),
    ],
)
def test_a_bad_trace_is_refused_by_file_and_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = written(tmp_path, name, text)
    with pytest.raises(TraceError, match=message) as refusal:
        read_trace(path)
    assert str(path) in str(refusal.value)


def test_a_missing_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot read the trace"):
        read_trace(tmp_path / "nowhere.csv")


def test_a_binary_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(TraceError, match="cannot read the trace"):
        read_trace(path)


ticks = st.lists(st.integers(0, 20), min_size=1, max_size=40).map(sorted)


@given(ticks, st.sampled_from([0.5, 3.0]), st.integers(0, 9))
def test_requests_of_a_coarse_clock_are_spread_but_stay_in_their_bin_and_order(
    ticks: list[int], bin_s: float, seed: int
) -> None:
    rows = tuple(TraceRow(tick * bin_s, 100 + place, 1) for place, tick in enumerate(ticks))
    spread = spread_in_bins(rows, bin_s, seed)
    assert [row.input_tokens for row in spread] == [row.input_tokens for row in rows]
    moments = [row.timestamp_s for row in spread]
    assert moments == sorted(moments)
    assert all(row.timestamp_s <= now_s <= row.timestamp_s + bin_s for row, now_s in zip(rows, moments, strict=True))
    assert spread == spread_in_bins(rows, bin_s, seed)


def test_a_crowded_tick_becomes_an_even_stream() -> None:
    rows = tuple(TraceRow(6.0, 1, 1) for _ in range(3000))
    moments = [row.timestamp_s for row in spread_in_bins(rows, 3.0, seed=0)]
    assert len(set(moments)) == 3000
    assert sum(moments) / 3000 == pytest.approx(7.5, abs=0.1)
