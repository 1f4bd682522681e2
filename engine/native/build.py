"""Compiles src/ once per user, compiler and version of the source; later starts only look the file up."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
MAIN = "kernels.cpp"
# The instruction set is spelled out rather than "native": a home folder may be shared by machines that differ.
FLAGS = ("-std=c++20", "-O3", "-march=x86-64-v4", "-mavx512bf16", "-mavx512vbmi", "-fPIC", "-shared", "-pthread")
COMPILERS = ("g++", "c++", "clang++")
COMPILE_TIMEOUT_S = 120
COMPILER_TIMEOUT_S = 10


class BuildFailed(Exception):
    """There is no compiler, or it refused; the message says which and why."""


def build_library(cache: Path, flags: Sequence[str] = FLAGS) -> Path:
    """The compiled library, from `cache` if it is there. Several processes may build at once; each gets a whole file.

    Raises: BuildFailed.
    """
    compiler = find_compiler()
    library = cache / f"kernels-{_key(compiler, flags)}.so"
    if not library.is_file():
        try:
            cache.mkdir(parents=True, exist_ok=True)
            _compile(compiler, flags, library)
        except OSError as error:
            raise BuildFailed(f"{cache} cannot be written: {error.strerror}") from error
    return library


def find_compiler() -> str:
    """Raises: BuildFailed."""
    for name in COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return path
    raise BuildFailed(f"there is no C++ compiler ({', '.join(COMPILERS)})")


def default_cache() -> Path:
    """Where the XDG base directory specification wants it."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "pdserve" / "native"


def _compile(compiler: str, flags: Sequence[str], library: Path) -> None:
    """Under a name of its own first, so that nobody ever loads half a file."""
    descriptor, partial = tempfile.mkstemp(prefix=library.stem, suffix=".partial", dir=library.parent)
    os.close(descriptor)
    try:
        _run([compiler, *flags, str(SOURCES / MAIN), "-o", partial], COMPILE_TIMEOUT_S)
        os.replace(partial, library)
    finally:
        Path(partial).unlink(missing_ok=True)


def _key(compiler: str, flags: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for part in (compiler, _run([compiler, "--version"], COMPILER_TIMEOUT_S), *flags):
        digest.update(part.encode() + b"\0")
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _run(command: Sequence[str], timeout_s: float) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildFailed(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        first_lines = " / ".join(done.stderr.splitlines()[:3])
        raise BuildFailed(f"{command[0]} failed: {first_lines}")
    return done.stdout
