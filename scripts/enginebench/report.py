"""Figures of one number of threads as tables for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from enginebench.figures import Figure
from enginebench.measure import BATCHES, COMPARED_LENGTH, DECODE_POINTS, PREFILL_LENGTHS, SAMPLING, SHORT

PYTHON_NOTE = "Python: of a step, outside kernels; a ceiling, see enginebench/clock.py"


def report_tables(figures: Sequence[Figure]) -> Iterator[Table]:
    values = {figure.key: figure.value for figure in figures}
    reading, multiplying = values["limit.read"], values["limit.multiply"]
    limits = f"limits: {reading:.1f} GB/s read, {multiplying:,.0f} GFLOP/s multiplied"
    yield _prefill(values, f"{figures[0].num_threads} thread(s), {limits}")
    yield _decode(values)
    yield _sampling(values)
    yield _beside_transformers(values)
    if any(figure.goal is not None for figure in figures):
        yield _goals(figures)


def _prefill(values: dict[str, float], title: str) -> Table:
    table = _table(
        title, "prefill", "tokens/s\nin chunks", "of\nmultiply", "in one\nstep", "of\nmultiply", "of\nread", "GFLOP"
    )
    for length in PREFILL_LENGTHS:
        whole, chunks = f"prefill_{length}", f"prefill_in_chunks_{length}"
        _, operations, read_share, multiply_share = _work(values, whole)
        table.add_row(
            f"{length} tokens",
            f"{values[f'{chunks}.rate']:,.0f}",
            f"{values[f'{chunks}.multiply_share']:.0%}",
            f"{values[f'{whole}.rate']:,.0f}",
            multiply_share,
            read_share,
            operations,
        )
    return table


def _decode(values: dict[str, float]) -> Table:
    table = _table(
        "", "decode of\nn × context", "TPOT\nms", "tokens/s", "MB", "GFLOP", "of\nread", "of\nmultiply", "Python"
    )
    table.caption, table.caption_justify = PYTHON_NOTE, "left"
    for point in DECODE_POINTS:
        key = f"decode_{point.batch}x{point.context}"
        table.add_row(
            f"{point.batch} × {point.context:,}",
            f"{values[f'{key}.tpot']:.2f}",
            f"{values[f'{key}.rate']:,.0f}",
            *_work(values, key),
            f"{values[f'{key}.python_share']:.0%}",
            end_section=point.batch == BATCHES[-1],
        )
    return table


def _sampling(values: dict[str, float]) -> Table:
    most = max(BATCHES)
    table = _table("", "sampling", "1 row\nms", "of a\nstep", f"{most} rows\nms each", "of a\nstep")
    for kind, options in SAMPLING.items():
        cells = []
        for rows in (1, most):
            key = f"sampling_{kind}_{rows}"
            cells += [f"{values[f'{key}.row_time']:.3f}", f"{values[f'{key}.step_share']:.1%}"]
        name = " ".join(f"{option} {value:g}" for option, value in options.items()) or "temperature 1"
        table.add_row(name, *cells)
    return table


def _work(values: dict[str, float], key: str) -> tuple[str, str, str, str]:
    return (
        f"{values[f'{key}.bytes'] / 1e6:,.1f}",
        f"{values[f'{key}.operations'] / 1e9:,.1f}",
        f"{values[f'{key}.read_share']:.0%}",
        f"{values[f'{key}.multiply_share']:.0%}",
    )


def _beside_transformers(values: dict[str, float]) -> Table:
    table = _table("", "beside transformers", "pdserve", "transformers", "times faster")
    for label, key in (
        (f"prefill of {COMPARED_LENGTH}, tokens/s", f"prefill_{COMPARED_LENGTH}.rate"),
        (f"decode of 1 × {SHORT}, TPOT in ms", f"decode_1x{SHORT}.tpot"),
    ):
        ratio = values[f"transformers.{key.rsplit('.', 1)[0]}.times_faster"]
        theirs = values[f"transformers.{key}"]
        table.add_row(label, f"{values[key]:,.1f}", f"{theirs:,.1f}", f"{ratio:.2f}")
    return table


def _goals(figures: Sequence[Figure]) -> Table:
    table = _table("", "goal", "measured", "wanted", "holds")
    for figure in figures:
        if figure.goal is not None:
            style = None if figure.holds else "red"
            table.add_row(
                figure.key, f"{figure.value:,.2f}", str(figure.goal), "yes" if figure.holds else "no", style=style
            )
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(*columns, title=title or None, title_justify="left", box=SIMPLE_HEAD, show_edge=False)
    for index, column in enumerate(table.columns):
        column.no_wrap = True
        column.justify = "right" if index else "left"
    return table
