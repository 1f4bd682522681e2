"""The figures of a whole system on this machine: the prefill/decode pair over each transport, beside colocated.

python scripts/bench_serving.py                                        about nine minutes on two cores
python scripts/bench_serving.py --config serve.yaml --repeats 5 --json result.json
python scripts/bench_serving.py --modes pair --transports torch_dist

It starts and stops every system itself, on free loopback ports. Run it on an idle machine: it shares the cores with
what it measures. Figures are medians; servingbench/figures.py says what each one is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bench_arguments import count, some_of, writable
from cluster.deployment import until_signal
from cluster.plan import available_cores
from cluster.supervisor import MemberGivenUp
from common.config import ServeConfig, load_config
from common.errors import ConfigError, ServingError
from common.model_source import resolve_model
from servingbench.client import BenchFailed
from servingbench.figures import Figure, figures_json
from servingbench.measure import Bench
from servingbench.report import report_table
from servingbench.system import Configuration

MODES = ("pair", "colocated")
TRANSPORTS = ("grpc", "torch_dist")
MIN_WIDTH = 90  # of the table, also where the output is no terminal
EXIT_FAILED, EXIT_MISCONFIGURED, EXIT_INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """What was measured before a failure or an interrupt is still reported."""
    options = _parser().parse_args(arguments)
    configurations = _configurations(options.modes, options.transports)
    console = Console(stderr=True, highlight=False, markup=False)
    figures: dict[Configuration, list[Figure]] = {}
    status = 0
    try:
        config = load_config(options.config)
        resolve_model(config.model.source)  # so that no start is measured with a download in it
        bench = Bench(config, options.repeats, console.print)
        asyncio.run(until_signal(_measure_each(bench, configurations, figures)))
    except ConfigError as error:
        print(f"bench_serving: {error}", file=sys.stderr)
        return EXIT_MISCONFIGURED
    except (MemberGivenUp, ServingError, BenchFailed) as error:
        print(f"bench_serving: {error}", file=sys.stderr)
        status = EXIT_FAILED
    if status == 0 and len(figures) < len(configurations):
        print("bench_serving: interrupted; this is what was measured before", file=sys.stderr)
        status = EXIT_INTERRUPTED
    _report(config, options, [figure for each in figures.values() for figure in each])
    return status


async def _measure_each(
    bench: Bench, configurations: Sequence[Configuration], figures: dict[Configuration, list[Figure]]
) -> None:
    """One after the other: nothing else of ours runs meanwhile."""
    for configuration in configurations:
        figures[configuration] = await bench.measure(configuration)


def _report(config: ServeConfig, options: argparse.Namespace, figures: Sequence[Figure]) -> None:
    if not figures:
        return
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, MIN_WIDTH)
    title = f"{config.model.served_name}, {available_cores()} cores, passes: {options.repeats}"
    console.print(report_table(figures, title))
    if options.json is not None:
        options.json.write_text(json.dumps(figures_json(figures), indent=2) + "\n", encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench_serving.py", description="The figures of a whole system, here.")
    parser.add_argument("--config", type=Path, default=Path("serve.yaml"), help="default: serve.yaml")
    parser.add_argument("--repeats", type=count, default=5, metavar="N", help="passes; default: %(default)s")
    parser.add_argument("--json", type=writable, metavar="FILE", help="also write the figures here")
    parser.add_argument("--modes", type=some_of(MODES), default=MODES, metavar="LIST", help=f"of {','.join(MODES)}")
    parser.add_argument(
        "--transports", type=some_of(TRANSPORTS), default=TRANSPORTS, metavar="LIST", help=f"of {','.join(TRANSPORTS)}"
    )
    return parser


def _configurations(modes: Sequence[str], transports: Sequence[str]) -> list[Configuration]:
    pairs = [Configuration(transport) for transport in transports] if "pair" in modes else []
    return pairs + ([Configuration(None)] if "colocated" in modes else [])


if __name__ == "__main__":
    sys.exit(main())
