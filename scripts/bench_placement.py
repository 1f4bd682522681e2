"""Who should compute prompts: `auto` beside `always`, `never` and two colocated workers, on this machine.

python scripts/bench_placement.py --trace azure2023_conv.csv          about half an hour on two cores
python scripts/bench_placement.py --trace azure2023_conv.csv --parts rate --configurations auto,colocated --json FILE

Three parts. rate: the highest Poisson rate at which 90 % of the requests meet their objectives, with the trace's
lengths; slo.ttft_s is set, and who is refused has missed. overload: three times that rate. interference: the gaps
between the tokens of four running streams, alone and while long prompts arrive. It starts and stops every system
itself; let nothing else run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bench_arguments import above_zero, some_of, writable
from cluster.deployment import until_signal
from cluster.supervisor import MemberGivenUp
from common.config import load_config
from common.errors import ConfigError
from loadgen.record import Unreachable
from loadgen.trace import TraceError, TraceRow, read_trace
from placementbench.figures import Figure, as_json, report_table
from placementbench.measure import PARTS, Bench
from placementbench.systems import CONFIGURATIONS

EXIT_FAILED, EXIT_MISCONFIGURED = 1, 2
MIN_WIDTH = 100  # of the table, also where the output is no terminal
INPUT_TOKENS, OUTPUT_TOKENS = range(1, 1025), range(16, 129)  # the requests of the trace that are sent


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    console = Console(stderr=True, highlight=False, markup=False)
    figures: list[Figure] = []
    status = 0
    try:
        rows = _rows(options.trace)
        bench = Bench(load_config(options.config), rows, options.seconds, console.print)
        asyncio.run(until_signal(bench.run(options.configurations, options.parts, figures)))
    except (ConfigError, TraceError) as error:
        print(f"bench_placement: {error}", file=sys.stderr)
        return EXIT_MISCONFIGURED
    except (MemberGivenUp, Unreachable, TimeoutError) as error:
        print(f"bench_placement: {error}", file=sys.stderr)
        status = EXIT_FAILED
    _report(figures, options.json)
    return status


def _rows(path: Path) -> tuple[TraceRow, ...]:
    """Raises: TraceError."""
    rows = tuple(
        row for row in read_trace(path) if row.input_tokens in INPUT_TOKENS and row.output_tokens in OUTPUT_TOKENS
    )
    if not rows:
        raise TraceError(f"{path} has no request of {INPUT_TOKENS} prompt tokens and {OUTPUT_TOKENS} new ones")
    return rows


def _report(figures: Sequence[Figure], json_path: Path | None) -> None:
    """What was measured before a failure or an interrupt, too."""
    if figures:
        console = Console()
        if not console.is_terminal:
            console.width = max(console.width, MIN_WIDTH)
        console.print(report_table(figures))
    if json_path is not None:
        json_path.write_text(json.dumps(as_json(figures), indent=2) + "\n", encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench_placement.py", description="Who should compute prompts, measured here."
    )
    parser.add_argument("--trace", type=Path, required=True, help="lengths: Azure's .csv or Mooncake's .jsonl")
    parser.add_argument("--config", type=Path, default=Path("serve.yaml"), help="default: serve.yaml")
    parser.add_argument("--configurations", type=some_of(CONFIGURATIONS), default=CONFIGURATIONS, metavar="LIST")
    parser.add_argument("--parts", type=some_of(PARTS), default=PARTS, metavar="LIST", help=f"of {','.join(PARTS)}")
    parser.add_argument(
        "--seconds", type=above_zero, default=60.0, metavar="N", help="of each rate; default: %(default)s"
    )
    parser.add_argument("--json", type=writable, metavar="FILE", help="also write the figures here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
