"""The router alone on this machine: what it adds to latency, how much it carries on one core, and what it remembers.

python scripts/bench_router.py                                      about ten minutes on two cores
python scripts/bench_router.py --memory-requests 0 --passes 1 --json result.json
python scripts/bench_router.py --quick                              one small pass: does it work at all?

A real router process, with its HTTP and gRPC APIs, has the first core to itself; stub workers in a second process and
the clients share the others. Run it on an idle machine. routerbench/figures.py says what each figure is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from bench_arguments import count, writable
from cluster.deployment import until_signal
from cluster.host import HostError
from cluster.plan import available_cores
from common.config import ServeConfig, load_config
from common.errors import ConfigError, ModelError, ServingError
from routerbench.answer import AnswerFailed
from routerbench.figures import Figure, figures_json, figures_of
from routerbench.measure import FULL, QUICK, Bench, Samples, Sizes
from routerbench.report import report_tables
from routerbench.router_process import RouterFailed

MIN_WIDTH = 110  # of the tables, also where the output is no terminal
MIN_MEMORY_REQUESTS = 10
EXIT_FAILED, EXIT_MISCONFIGURED, EXIT_INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """What was measured before a failure or an interrupt is still reported."""
    options = _options(arguments)
    try:
        config = load_config(options.config_path)
    except ConfigError as error:
        return _misconfigured(error)
    run = Run(options, config)
    try:
        asyncio.run(until_signal(run.measure()))
    except (ConfigError, ModelError) as error:
        return _misconfigured(error)
    except (ServingError, AnswerFailed, RouterFailed, HostError, OSError, TimeoutError) as error:
        print(f"bench_router: {type(error).__name__}: {error}", file=sys.stderr)
        _report(run.figures, options)
        return EXIT_FAILED
    if not run.is_complete:
        print("bench_router: interrupted; this is what was measured before", file=sys.stderr)
    _report(run.figures, options)
    return 0 if run.is_complete else EXIT_INTERRUPTED


@dataclass(frozen=True)
class Options:
    sizes: Sizes
    config_path: Path
    json_path: Path | None


@dataclass
class Run:
    options: Options
    config: ServeConfig
    samples: Samples = field(default_factory=Samples)
    is_complete: bool = False

    @property
    def figures(self) -> list[Figure]:
        return figures_of(self.samples)

    async def measure(self) -> None:
        console = Console(stderr=True, highlight=False, markup=False)
        bench = Bench(self.config, self.options.sizes, lambda text: console.print(text, soft_wrap=True))
        await bench.measure(self.samples)
        self.is_complete = True


def _misconfigured(error: Exception) -> int:
    print(f"bench_router: {error}", file=sys.stderr)
    return EXIT_MISCONFIGURED


def _report(figures: Sequence[Figure], options: Options) -> None:
    if not figures:
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, MIN_WIDTH)
    sizes = options.sizes
    title = f"the router, {available_cores()} cores, passes: {sizes.passes}, streams: {sizes.latency_streams}"
    for table in report_tables(figures, title):
        console.print(table, "")
    if options.json_path is not None:
        options.json_path.write_text(json.dumps(figures_json(figures), indent=2) + "\n", encoding="utf-8")


def _options(arguments: Sequence[str] | None) -> Options:
    parser = argparse.ArgumentParser(prog="bench_router.py", description="The router alone, here.")
    parser.add_argument(
        "--passes", type=_number, metavar="N", help=f"after a warm-up; 0 measures memory alone; default: {FULL.passes}"
    )
    parser.add_argument("--prompt-tokens", type=count, default=128, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--memory-requests",
        type=_memory_requests,
        metavar="N",
        help=f"0 skips memory; default: {FULL.memory_requests:,}",
    )
    parser.add_argument("--quick", action="store_true", help="one pass of everything, small")
    parser.add_argument("--config", type=Path, default=Path("serve.yaml"), help="default: serve.yaml")
    parser.add_argument("--json", type=writable, metavar="FILE", help="also write the figures here")
    given = parser.parse_args(arguments)
    sizes = QUICK if given.quick else FULL
    num_requests = sizes.memory_requests if given.memory_requests is None else given.memory_requests
    sizes = replace(
        sizes,
        passes=sizes.passes if given.passes is None else given.passes,
        prompt_tokens=given.prompt_tokens,
        memory_requests=num_requests,
    )
    return Options(sizes, given.config, given.json)


def _number(text: str) -> int:
    return 0 if text == "0" else count(text)


def _memory_requests(text: str) -> int:
    if 0 < (number := _number(text)) < MIN_MEMORY_REQUESTS:
        raise argparse.ArgumentTypeError(f"{text} is less than {MIN_MEMORY_REQUESTS}")
    return number


if __name__ == "__main__":
    sys.exit(main())
