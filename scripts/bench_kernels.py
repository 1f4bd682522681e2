"""The native CPU kernels against torch's own operations and against what this machine can do at all.

python scripts/bench_kernels.py                        about two minutes
python scripts/bench_kernels.py --threads 1 --only attention --repeats 30 --json result.json

Shapes of SmolLM2-135M, all 30 layers. The limit of a workload is the time to read its bytes, or to do its operations,
at the rates measured in the same run. Kernels and torch take turns and the best of the repeats counts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from bench_arguments import count, counts, some_of, writable
from engine.native.kernels import NativeKernels
from engine.native.load import load_native
from kernelbench.measure import LimitProbe, Limits, Measured, measure
from kernelbench.workloads import Workload, attention_workloads, elementwise_workloads, linear_workloads

KINDS: dict[str, Callable[[NativeKernels], Iterator[Workload]]] = {
    "linear": linear_workloads,
    "attention": attention_workloads,
    "elementwise": elementwise_workloads,
}
EXIT_NO_KERNELS = 1


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    console = Console(highlight=False, markup=False)
    figures: list[dict[str, Any]] = []
    for num_threads in options.threads:
        kernels = load_native(num_threads)
        if kernels is None:
            print("bench_kernels: this machine has no native kernels", file=sys.stderr)
            return EXIT_NO_KERNELS
        torch.set_num_threads(num_threads)
        limits, measured = _measure(kernels, options.only, options.repeats)
        console.print(_table(num_threads, limits, measured))
        figures += _figures(num_threads, limits, measured)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


def _measure(kernels: NativeKernels, kinds: Sequence[str], repeats: int) -> tuple[Limits, list[Measured]]:
    probe = LimitProbe(kernels)
    measured = []
    for kind in kinds:
        for workload in KINDS[kind](kernels):
            probe.run(3)
            measured.append(measure(workload, repeats))
    return probe.limits, measured


def _table(num_threads: int, limits: Limits, measured: Sequence[Measured]) -> Table:
    reading, multiplying = limits.read_bytes_per_s / 1e9, limits.operations_per_s / 1e9
    title = f"{num_threads} thread(s): {reading:.1f} GB/s read, {multiplying:.0f} GFLOP/s bf16"
    table = Table("workload", "ms", "of the limit", "times torch", title=title, box=SIMPLE_HEAD, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for each in measured:
        share = _share(limits, each)
        table.add_row(
            each.workload.name,
            f"{each.native_s * 1e3:.2f}",
            "" if share is None else f"{share:.0%}",
            f"{each.torch_s / each.native_s:.1f}",
        )
    return table


def _figures(num_threads: int, limits: Limits, measured: Sequence[Measured]) -> Iterator[dict[str, Any]]:
    threads = f"{num_threads}_threads"
    yield _figure(f"limit.read.{threads}", limits.read_bytes_per_s / 1e9, "GB/s")
    yield _figure(f"limit.multiply.{threads}", limits.operations_per_s / 1e9, "GFLOP/s")
    for each in measured:
        name = f"{each.workload.name}.{threads}"
        yield _figure(f"{name}.time", each.native_s * 1e3, "ms")
        yield _figure(f"{name}.speedup", each.torch_s / each.native_s, "times torch")
        share = _share(limits, each)
        if share is not None:
            yield _figure(f"{name}.share", share, "of the limit", each.workload.goal)


def _figure(name: str, value: float, unit: str, at_least: float | None = None) -> dict[str, Any]:
    return {
        "name": name,
        "value": value,
        "unit": unit,
        "goal": None if at_least is None else f">= {at_least:g}",
        "holds": None if at_least is None else value >= at_least,
    }


def _share(limits: Limits, measured: Measured) -> float | None:
    limit_s = limits.seconds(measured.workload)
    return limit_s / measured.native_s if limit_s else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench_kernels.py", description="Native CPU kernels against torch.")
    parser.add_argument("--threads", type=counts, default=(1, 2), metavar="LIST", help="default: 1,2")
    parser.add_argument(
        "--only", type=some_of(KINDS), default=tuple(KINDS), metavar="LIST", help=f"of {','.join(KINDS)}"
    )
    parser.add_argument("--repeats", type=count, default=15, metavar="N", help="default: %(default)s")
    parser.add_argument("--json", type=writable, metavar="FILE", help="also write the figures here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
