"""What int8 weights bring and cost on this machine's CPU, beside bfloat16 in the same run: speed, and quality.

python scripts/bench_quantization.py                        about three minutes on two cores
python scripts/bench_quantization.py --threads 2 --repeats 15 --json result.json

The engines take turns and speeds are medians. Quality: how well the model predicts enginebench/quality_text.txt, and
how often int8 and bfloat16 would choose the same next token; float32 shows what rounding does by itself.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bench_arguments import count, counts, writable
from common.config import DEFAULT_MODEL
from common.engine_config import EngineConfig
from common.errors import ConfigError, ServingError
from common.model_source import resolve_model
from engine.build import build_engine
from engine.model.weights import open_checkpoint
from engine.native.packing import WeightFormat
from enginebench.beside import Speeds, measure_beside
from enginebench.quality import TEXT, Predictions, predictions
from enginebench.report_beside import figures_beside, quality_table, speed_table
from router.tokenizer import load_tokenizer

EXIT_MISCONFIGURED = 2
QUANTIZATIONS = {"none": WeightFormat.BFLOAT16, "int8": WeightFormat.INT8}
KV_CACHE_BYTES = 256 << 20


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    console = Console(highlight=False, markup=False, width=100)
    speeds: dict[int, Speeds] = {}
    try:
        model_path = resolve_model(options.model)
        for num_threads in options.threads:
            speeds[num_threads] = _speeds(model_path, num_threads, options.repeats)
            console.print(speed_table(num_threads, speeds[num_threads]), "")
        quality = _quality(model_path, max(options.threads))
    except (ConfigError, ServingError) as error:
        print(f"bench_quantization: {error}", file=sys.stderr)
        return EXIT_MISCONFIGURED
    console.print(quality_table(quality))
    if options.json is not None:
        options.json.write_text(json.dumps(figures_beside(speeds, quality), indent=2) + "\n", encoding="utf-8")
    return 0


def _speeds(model_path: Path, num_threads: int, repeats: int) -> Speeds:
    engines = {
        name: build_engine(
            EngineConfig(
                model_path,
                dtype="bfloat16",
                device="cpu",
                attention="native",
                quantization=name,
                num_threads=num_threads,
                kv_cache_bytes=KV_CACHE_BYTES,
                max_num_batched_tokens=2048,
            )
        )
        for name in QUANTIZATIONS
    }
    return measure_beside(engines, repeats)


def _quality(model_path: Path, num_threads: int) -> dict[str, Predictions]:
    longest = open_checkpoint(model_path).config.max_position_embeddings
    token_ids = load_tokenizer(model_path).encode(TEXT.read_text(encoding="utf-8"))[:longest]
    kinds = {"float32": None, **{weights.value: weights for weights in WeightFormat}}
    return {name: predictions(model_path, token_ids, weights, num_threads) for name, weights in kinds.items()}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench_quantization.py", description="int8 weights beside bfloat16.")
    parser.add_argument("--threads", type=counts, default=(1, 2), metavar="LIST", help="default: 1,2")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="as model.source in serve.yaml; default: %(default)s")
    parser.add_argument("--repeats", type=count, default=9, metavar="N", help="passes; default: %(default)s")
    parser.add_argument("--json", type=writable, metavar="FILE", help="also write the figures here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
