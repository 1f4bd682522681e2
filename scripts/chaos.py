"""Load at a fixed rate on a real deployment while its processes are killed, frozen, slowed and restarted.

python scripts/chaos.py                                        ten minutes, a fault every ten seconds
python scripts/chaos.py --duration 120 --fault-interval 5 --seed 7 --json result.json
python scripts/chaos.py --model FOLDER --faults kill,freeze --rate 10 --transport tcp

It starts and stops every process itself, on free loopback ports, as `pdserve up` does, and sends signals to no others.
Before the first fault it learns every answer; afterwards each one must be the same. All of a run, its requests and its
faults, follows from the seed; what they meet does not. chaoslab/figures.py says what each figure counts.

Exit status: 0 every goal holds, 1 one does not or the system never came up, 2 bad usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from rich.console import Console

from bench_arguments import above_zero, count, explained, some_of, writable
from chaoslab.figures import Figure, Run, figures_of
from chaoslab.report import complaints, figure_table, timeline_table
from chaoslab.run import ROUTER, ChaosFailed, Options, run_chaos
from chaoslab.schedule import FaultKind
from chaoslab.system import Size
from cluster.deployment import until_signal
from cluster.up import new_log_folder
from common.config import ServeConfig, TransferSection, load_config
from common.errors import ConfigError
from common.model_source import resolve_model
from loadgen.workload import LengthRange

EXIT_GOAL_MISSED, EXIT_MISCONFIGURED, EXIT_INTERRUPTED = 1, 2, 130
TRANSPORTS = get_args(TransferSection.model_fields["transport"].annotation)
KINDS = tuple(FaultKind)
TARGETS = (ROUTER, "prefill", "decode")
MIN_WIDTH = 100  # of the tables, also where the output is no terminal


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    say = Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print
    runs: list[Run] = []

    async def run() -> None:
        runs.append(await run_chaos(config, _chaos_options(options), logs, say))

    try:
        config = _config(options)
        resolve_model(config.model.source)  # a download is no part of the start
        logs = new_log_folder(options.logs)
        if any(logs.glob("*.log")):
            raise ConfigError(f"--logs: {logs} holds another run's logs, which would be counted too")
        say(f"{config.model.served_name}, seed {options.seed}, logs in {logs}")
        asyncio.run(until_signal(run()))
    except ConfigError as error:
        print(f"chaos: {error}", file=sys.stderr)
        return EXIT_MISCONFIGURED
    except ChaosFailed as error:
        print(f"chaos: {error}", file=sys.stderr)
        return EXIT_GOAL_MISSED
    if not runs:
        print("chaos: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return _report(runs[0], options)


def _report(run: Run, options: argparse.Namespace) -> int:
    figures = figures_of(run)
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = max(console.width, MIN_WIDTH)
    console.print(timeline_table(run), "")
    console.print(_title(options), figure_table(figures), sep="\n")
    for line in complaints(run):
        console.print(line, soft_wrap=True)
    if options.json is not None:
        options.json.write_text(json.dumps([figure.as_json() for figure in figures], indent=2) + "\n", encoding="utf-8")
    return EXIT_GOAL_MISSED if _has_missed(figures) else 0


def _has_missed(figures: Sequence[Figure]) -> bool:
    return any(figure.holds is False for figure in figures)


def _title(options: argparse.Namespace) -> str:
    return (
        f"{options.routers} routers, {options.prefill} prefill + {options.decode} decode workers, "
        f"{options.duration:g} s, {options.rate:g} requests/s, "
        f"a fault every {options.fault_interval:g} s, seed {options.seed}"
    )


def _config(options: argparse.Namespace) -> ServeConfig:
    config = load_config(options.config)
    if options.model is None:
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"source": options.model, "name": None})})


def _chaos_options(options: argparse.Namespace) -> Options:
    return Options(
        seed=options.seed,
        duration_s=options.duration,
        rate=options.rate,
        fault_interval_s=options.fault_interval,
        kinds=options.faults,
        targets=options.targets,
        size=Size(options.prefill, options.decode, options.routers, options.transport),
        deadline_s=options.deadline,
        num_asks=options.num_asks,
        output_tokens=options.output_tokens,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="chaos.py", description="Faults under load, and what clients see of them.")
    add = parser.add_argument
    add("--config", type=Path, default=Path("serve.yaml"), help="default: serve.yaml")
    add("--model", metavar="SOURCE", help="instead of the config's")
    add("--seed", type=int, default=0, help="default: %(default)s")
    add("--duration", type=above_zero, default=600.0, metavar="SECONDS", help="of the load; default: %(default)g")
    add("--rate", type=above_zero, default=2.0, metavar="N", help="requests per second; default: %(default)g")
    add("--fault-interval", type=above_zero, default=10.0, metavar="SECONDS", help="default: %(default)g")
    add("--faults", type=_kinds, default=KINDS, metavar="LIST", help=f"of {','.join(KINDS)}")
    add("--targets", type=some_of(TARGETS), default=TARGETS, metavar="LIST", help=f"of {','.join(TARGETS)}")
    add("--prefill", type=count, default=2, metavar="N", help="workers; default: %(default)s")
    add("--decode", type=count, default=2, metavar="N", help="workers; default: %(default)s")
    add("--routers", type=count, default=2, metavar="N", help="that share the ports; default: %(default)s")
    add("--transport", choices=TRANSPORTS, help="instead of the config's")
    add("--deadline", type=above_zero, default=30.0, metavar="SECONDS", help="of each request; default: %(default)g")
    add("--num-asks", type=count, default=40, metavar="N", help="different requests; default: %(default)s")
    add(
        "--output-tokens",
        type=explained(LengthRange.parse),
        default=LengthRange(16, 96),
        metavar="LOW:HIGH",
        help="default: 16:96",
    )
    add("--logs", type=Path, metavar="FOLDER", help="of the processes; default: a new one, as pdserve up has it")
    add("--json", type=writable, metavar="FILE", help="also write the figures here")
    return parser


def _kinds(text: str) -> tuple[FaultKind, ...]:
    return tuple(FaultKind(kind) for kind in some_of(KINDS)(text))


if __name__ == "__main__":
    sys.exit(main())
