"""One engine's prefill and decode, against what this machine can do at all and beside Hugging Face transformers.

python scripts/bench_engine.py                                         about four minutes on two cores
python scripts/bench_engine.py --threads 2 --repeats 9 --json result.json
python scripts/bench_engine.py --attention cpu --model path/to/folder

Run it on an idle machine. Everything takes turns in one process, pass by pass, and figures are medians over the passes;
enginebench/figures.py says what each one is. The goals are for the built-in model in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from bench_arguments import above_zero, count, counts, writable
from common.config import DEFAULT_MODEL
from common.engine_config import EngineConfig
from common.errors import ConfigError, ServingError
from common.model_source import resolve_model
from engine.build import build_engine, default_step_tokens
from engine.engine import Engine
from engine.model.weights import open_checkpoint
from engine.native.load import load_native
from enginebench.figures import Figure, Run, figures_json, figures_of
from enginebench.limits import probe_for
from enginebench.measure import CAPACITY_TOKENS, PREFILL_LENGTHS, Subjects, measure
from enginebench.reference import Reference
from enginebench.report import report_tables
from enginebench.work import NumberBytes

MIN_WIDTH = 80  # of the tables, also where the output is no terminal
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
EXIT_MISCONFIGURED = 2


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = max(console.width, MIN_WIDTH)
    figures: list[Figure] = []
    try:
        model_path = resolve_model(options.model)
        reference = Reference(model_path, DTYPES[options.dtype])
        for num_threads in options.threads:
            figures_here = figures_of(_run(options, model_path, reference, num_threads))
            for table in report_tables(figures_here):
                console.print(table, "")
            figures += figures_here
    except (ConfigError, ServingError) as error:
        print(f"bench_engine: {error}", file=sys.stderr)
        return EXIT_MISCONFIGURED
    if options.json is not None:
        options.json.write_text(json.dumps(figures_json(figures), indent=2) + "\n", encoding="utf-8")
    return 0


def _run(options: argparse.Namespace, model_path: Path, reference: Reference, num_threads: int) -> Run:
    """Raises: ConfigError."""
    kernels, dtype = load_native(num_threads), DTYPES[options.dtype]
    subjects = Subjects(
        whole=_engine(options, model_path, num_threads, max(PREFILL_LENGTHS)),
        chunked=_engine(options, model_path, num_threads, default_step_tokens(torch.device("cpu"))),
        reference=reference,
        kernels=kernels,
        probe=probe_for(kernels, dtype, num_threads),
        num_threads=num_threads,
    )

    def report(number: int, seconds: float) -> None:
        which = f"pass {number} of {options.repeats}" if number else "warm-up"
        print(f"{num_threads} thread(s): {which}, {seconds:.0f} s", file=sys.stderr)

    passes = measure(subjects, options.repeats, report)
    return Run(
        model=open_checkpoint(model_path).config,
        number_bytes=NumberBytes(1 if options.quantization == "int8" else dtype.itemsize, dtype.itemsize),
        num_threads=num_threads,
        limits=subjects.probe.limits,
        passes=passes,
        has_goals=options.model == DEFAULT_MODEL and dtype == torch.bfloat16 and options.quantization == "none",
    )


def _engine(options: argparse.Namespace, model_path: Path, num_threads: int, step_tokens: int) -> Engine:
    config = EngineConfig(
        model_path,
        dtype=options.dtype,
        device="cpu",
        attention=options.attention,
        quantization=options.quantization,
        num_threads=num_threads,
        kv_cache_bytes=int(options.kv_cache_gib * 2**30),
        max_num_batched_tokens=step_tokens,
    )
    engine = build_engine(config)
    limits = engine.limits
    if limits.kv_capacity_tokens < CAPACITY_TOKENS:
        raise ConfigError(
            f"the KV cache holds {limits.kv_capacity_tokens} tokens and {CAPACITY_TOKENS} are needed: raise "
            "--kv-cache-gib"
        )
    if limits.max_model_len < max(PREFILL_LENGTHS):
        raise ConfigError(f"the model takes {limits.max_model_len} tokens; prompts have up to {max(PREFILL_LENGTHS)}")
    return engine


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench_engine.py", description="One engine on this machine's CPU.")
    parser.add_argument("--threads", type=counts, default=(1, 2), metavar="LIST", help="default: 1,2")
    parser.add_argument("--attention", default="auto", choices=("auto", "native", "cpu"), help="default: auto")
    parser.add_argument("--quantization", default="none", choices=("none", "int8"), help="default: %(default)s")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="as model.source in serve.yaml; default: %(default)s")
    parser.add_argument("--dtype", default="bfloat16", choices=tuple(DTYPES), help="default: %(default)s")
    parser.add_argument("--kv-cache-gib", type=above_zero, default=1.0, metavar="N", help="default: %(default)s")
    parser.add_argument("--repeats", type=count, default=5, metavar="N", help="passes; default: %(default)s")
    parser.add_argument("--json", type=writable, metavar="FILE", help="also write the figures here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
