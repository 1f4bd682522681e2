"""KV transfer on this machine: each transport beside the raw limit of what carries it, and the handoff of a system.

python scripts/bench_transfer.py                                       about six minutes on two cores
python scripts/bench_transfer.py --transports tcp,shm --skip-serving --json result.json
python scripts/bench_transfer.py --quick                               one small pass: does it work at all?

Transfers go between two processes on loopback; the receiver gives each piece back once it is verified. The system that
is measured is started and stopped here, on free ports. Run it on an idle machine. Figures are medians over the passes;
transferbench/figures.py says what each one is, transferbench/goals.py what is asked. 1 MB is 2²⁰ bytes, 1 GB is 10⁹.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from bench_arguments import count, counts, some_of, writable
from cluster.deployment import until_signal
from cluster.plan import available_cores
from cluster.supervisor import MemberGivenUp
from common.config import ServeConfig, load_config
from common.errors import ConfigError, ServingError
from common.model_source import resolve_model
from kv_transfer.checksum import CHECKSUM
from kv_transfer.plan import MAX_PLANNED_BYTES
from servingbench.client import BenchFailed
from transferbench.figures import Figure, figures_json, handoff_figures, transport_figures, unmeasured
from transferbench.goals import YARDSTICKS
from transferbench.measure import TransferPlan, measure_transport
from transferbench.report import report_tables
from transferbench.serving import HandoffBench, Loads

FULL_SIZES, QUICK_SIZES = (1, 8, 64, 256), (1, 8)  # MB
FULL_LOADS, QUICK_LOADS = Loads((128, 512, 2048), (1, 8)), Loads((128, 512), (1, 2))
FULL_REPEATS, QUICK_REPEATS = 5, 1
MAX_SIZE = 1024  # MB, held in memory here
MIN_PIECE_BYTES = 1024  # as in serve.yaml
MIN_WIDTH = 90  # of the tables, also where the output is no terminal
EXIT_FAILED, EXIT_MISCONFIGURED, EXIT_INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """What was measured before a failure or an interrupt is still reported."""
    options = _options(arguments)
    try:
        config = load_config(options.config_path)
        if options.loads is not None:
            resolve_model(config.model.source)  # so that no start has a download in it
    except ConfigError as error:
        print(f"bench_transfer: {error}", file=sys.stderr)
        return EXIT_MISCONFIGURED
    run = Run(options, config, Console(stderr=True, highlight=False, markup=False))
    asyncio.run(until_signal(run.measure_everything()))
    if not run.is_complete:
        print("bench_transfer: interrupted; this is what was measured before", file=sys.stderr)
    _report(run.figures, options)
    if not run.is_complete:
        return EXIT_INTERRUPTED
    return EXIT_FAILED if run.has_failed else 0


@dataclass(frozen=True)
class Options:
    transports: Sequence[str]
    sizes: Sequence[int]  # MB
    piece_bytes: int | None
    repeats: int
    loads: Loads | None  # None: no system
    config_path: Path
    json_path: Path | None


@dataclass
class Run:
    """One after the other: nothing else of ours runs meanwhile."""

    options: Options
    config: ServeConfig
    console: Console
    figures: list[Figure] = field(default_factory=list)
    has_failed: bool = False
    is_complete: bool = False

    async def measure_everything(self) -> None:
        for name in self.options.transports:
            self.figures += await self._measure_transport(name)
        if self.options.loads is not None:
            self.figures += await self._measure_handoff(self.options.loads)
        self.is_complete = True

    async def _measure_transport(self, name: str) -> list[Figure]:
        plan = TransferPlan(self.options.sizes, self.options.piece_bytes, self.options.repeats, self._say)
        try:
            return transport_figures(name, await measure_transport(name, plan))
        except ConfigError as error:
            return [self._unmeasured(name, f"skipped: {error}")]
        except (ServingError, OSError, RuntimeError) as error:
            self.has_failed = True
            return [self._unmeasured(name, f"failed: {type(error).__name__}: {error}")]

    async def _measure_handoff(self, loads: Loads) -> list[Figure]:
        try:
            return handoff_figures(await HandoffBench(self.config, loads, self.options.repeats, self._say).measure())
        except (ConfigError, MemberGivenUp, ServingError, BenchFailed) as error:
            self.has_failed = True
            return [self._unmeasured("handoff", f"failed: {type(error).__name__}: {error}")]

    def _unmeasured(self, subject: str, reason: str) -> Figure:
        self._say(f"{subject}: {reason}")
        return unmeasured(subject, reason)

    def _say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)


def _report(figures: Sequence[Figure], options: Options) -> None:
    if not figures:
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, MIN_WIDTH)
    title = f"KV transfer, {available_cores()} cores, passes: {options.repeats}, checksum: {CHECKSUM.name}"
    for table in report_tables(figures, title):
        console.print(table, "")
    if options.json_path is not None:
        options.json_path.write_text(json.dumps(figures_json(figures), indent=2) + "\n", encoding="utf-8")


def _options(arguments: Sequence[str] | None) -> Options:
    parser = argparse.ArgumentParser(prog="bench_transfer.py", description="KV transfer and the handoff, here.")
    known = ",".join(YARDSTICKS)
    parser.add_argument(
        "--transports", type=some_of(YARDSTICKS), default=tuple(YARDSTICKS), metavar="LIST", help=f"of {known}"
    )
    parser.add_argument("--sizes", type=_sizes, metavar="LIST", help="in MB; default: 1,8,64,256")
    parser.add_argument("--piece-bytes", type=_piece_bytes, metavar="N", help="aim; default: what suits the link")
    parser.add_argument("--repeats", type=count, metavar="N", help=f"passes; default: {FULL_REPEATS}")
    parser.add_argument("--quick", action="store_true", help="one pass of few sizes and loads")
    parser.add_argument("--skip-serving", action="store_true", help="transfers alone, no system")
    parser.add_argument("--config", type=Path, default=Path("serve.yaml"), help="of the system; default: serve.yaml")
    parser.add_argument("--json", type=writable, metavar="FILE", help="also write the figures here")
    given = parser.parse_args(arguments)
    return Options(
        given.transports,
        given.sizes or (QUICK_SIZES if given.quick else FULL_SIZES),
        given.piece_bytes,
        given.repeats or (QUICK_REPEATS if given.quick else FULL_REPEATS),
        None if given.skip_serving else (QUICK_LOADS if given.quick else FULL_LOADS),
        given.config,
        given.json,
    )


def _sizes(text: str) -> tuple[int, ...]:
    sizes = counts(text)
    if max(sizes) > MAX_SIZE:
        raise argparse.ArgumentTypeError(f"{max(sizes)} MB is more than {MAX_SIZE}")
    return sizes


def _piece_bytes(text: str) -> int:
    num_bytes = count(text)
    if not MIN_PIECE_BYTES <= num_bytes <= MAX_PLANNED_BYTES:
        raise argparse.ArgumentTypeError(f"{text} is not within {MIN_PIECE_BYTES} and {MAX_PLANNED_BYTES}")
    return num_bytes


if __name__ == "__main__":
    sys.exit(main())
