"""Does pdserve's CUDA path give the right answers on this GPU, and how near to its limits does it run?

python scripts/gpu_check.py                     about three minutes
python scripts/gpu_check.py --small             the same checks on less
python scripts/gpu_check.py --json result.json  also a list of {name, value, unit, goal, holds}

Needs this repository's folder and what a bare GPU image has: torch, triton, numpy, safetensors, transformers, grpcio,
protobuf. Each check is a process of its own: a kernel that goes wrong takes its process's GPU context along, and a
transfer that hangs is ended. Exit status: 0 every goal is met, 1 some are not, 2 there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # on a bare image nobody has installed the packages

import torch  # noqa: E402

from bench_arguments import writable  # noqa: E402
from gpucheck.checks import CHECKS  # noqa: E402
from gpucheck.figures import Figure, failed  # noqa: E402

EXIT_MISSED, EXIT_NO_GPU = 1, 2
CHECK_TIMEOUT_S = 120.0


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if not torch.cuda.is_available():
        print("gpu_check: no CUDA device here: nothing to check")
        return EXIT_NO_GPU
    if options.only is not None:
        figures = run_here(options.only, CHECKS[options.only](is_small=options.small), options.json)
    else:
        name, memory = torch.cuda.get_device_name(0), torch.cuda.mem_get_info(0)[1]
        print(f"{name}, {memory / 2**30:.0f} GiB, torch {torch.__version__}, CUDA {torch.version.cuda}", flush=True)
        figures = [figure for check in CHECKS for figure in run_apart(check, _command(check, options.small))]
        _save(figures, options.json)
    return EXIT_MISSED if any(figure.holds is False for figure in figures) else 0


def run_here(check: str, figures: Iterator[Figure], saved_at: Path | None) -> list[Figure]:
    """Every figure is printed and saved as it comes. A check that raises ends there, and what it had found stays."""
    found: list[Figure] = []
    try:
        for figure in figures:
            _keep(figure, found, saved_at)
    except Exception as error:  # a boundary: the other checks still want to run
        _keep(failed(f"{check}_check", f"{type(error).__name__}: {error}"), found, saved_at)
    return found


def run_apart(check: str, command: Sequence[str], timeout_s: float = CHECK_TIMEOUT_S) -> list[Figure]:
    """The figures of a check that runs in a process of its own and saves them where --json says, however it ends."""
    print(f"{check}:", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        saved_at = Path(folder) / "figures.json"
        ending: list[Figure] = []
        try:
            ended = subprocess.run([*command, "--json", str(saved_at)], timeout=timeout_s, check=False)
            if ended.returncode not in (0, EXIT_MISSED):
                ending = [failed(f"{check}_check", f"its process ended with status {ended.returncode}")]
        except subprocess.TimeoutExpired:
            ending = [failed(f"{check}_check", f"not done within {timeout_s:g} s")]
        found = json.loads(saved_at.read_text(encoding="utf-8")) if saved_at.is_file() else []
    for figure in ending:
        print(figure, flush=True)
    return [Figure(**fields) for fields in found] + ending


def _keep(figure: Figure, found: list[Figure], saved_at: Path | None) -> None:
    found.append(figure)
    print(figure, flush=True)
    _save(found, saved_at)


def _save(figures: Sequence[Figure], saved_at: Path | None) -> None:
    """In one go: whoever reads it meanwhile finds a whole list."""
    if saved_at is not None:
        scratch = saved_at.with_name(saved_at.name + ".part")
        scratch.write_text(json.dumps([figure.as_json() for figure in figures], indent=2) + "\n", encoding="utf-8")
        scratch.replace(saved_at)


def _command(check: str, is_small: bool) -> list[str]:
    return [sys.executable, __file__, "--only", check, *(["--small"] if is_small else [])]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu_check.py", description="Check and measure the CUDA path on this GPU.")
    parser.add_argument("--small", action="store_true", help="less of everything; the model has 4 of its 32 layers")
    parser.add_argument("--only", choices=list(CHECKS), help="one check, in this process")
    parser.add_argument("--json", type=writable, metavar="FILE", help="also write the figures here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
