"""Compiles src/ once per user and version of the source; later starts only look the file up, and need no compiler.

A library's name says which source it was compiled from and what its own bytes are, so that a file which a full disk, a
crash or a copy has damaged is found out before it is loaded: loading it would kill the process.

    kernels-<hash of flags and source>-<hash of the file>.so
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
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


class BuildFailed(Exception):
    """There is no compiler, or it refused, or there is no place for the result; the message says which and why."""


def build_library(cache: Path, flags: Sequence[str] = FLAGS) -> Path:
    """The compiled library, from `cache` if it is there undamaged.

    Raises: BuildFailed.
    """
    return find_library(cache, flags) or compile_library(cache, flags)


def find_library(cache: Path, flags: Sequence[str] = FLAGS) -> Path | None:
    """What an earlier call has compiled. Deletes files that are not what their names say."""
    for path in sorted(cache.glob(f"kernels-{_source_key(flags)}-*.so")):
        try:
            if path.stem.rpartition("-")[2] == _hash(path.read_bytes()):
                return path
            path.unlink(missing_ok=True)
        except OSError:  # not ours to read or delete, or just deleted by another process
            continue
    return None


def compile_library(cache: Path, flags: Sequence[str] = FLAGS) -> Path:
    """Whatever is in `cache` already. Several processes may compile at once; each gets a whole file.

    Raises: BuildFailed.
    """
    compiler = find_compiler()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        return _compile(compiler, flags, cache)
    except OSError as error:
        raise BuildFailed(f"{cache} cannot be written: {error.strerror}") from error


def find_compiler() -> str:
    """Raises: BuildFailed."""
    for name in COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return path
    raise BuildFailed(f"there is no C++ compiler ({', '.join(COMPILERS)})")


def default_cache() -> Path:
    """Where the XDG base directory specification wants it; without a home, a folder among the temporary files.

    Raises: BuildFailed when that is not the user's alone: who else can write there could have anything loaded.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not root.is_absolute():
        try:
            root = Path.home() / ".cache"
        except RuntimeError:  # HOME is not set, and nobody of this number is known
            root = _private_folder()
    return root / "pdserve" / "native"


def _private_folder() -> Path:
    try:
        folder = Path(tempfile.gettempdir()) / f"pdserve-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise BuildFailed(f"there is no folder for them: {error}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise BuildFailed(f"{folder} is not this user's alone; remove it or set XDG_CACHE_HOME")
    return folder


def _compile(compiler: str, flags: Sequence[str], cache: Path) -> Path:
    """Under another name first, so that nobody ever loads half a file, not even after the machine has lost power."""
    descriptor, name = tempfile.mkstemp(prefix="kernels", suffix=".partial", dir=cache)
    os.close(descriptor)
    partial = Path(name)
    try:
        _run([compiler, *flags, str(SOURCES / MAIN), "-o", name], COMPILE_TIMEOUT_S)
        with partial.open("rb") as file:
            library = cache / f"kernels-{_source_key(flags)}-{_hash(file.read())}.so"
            os.fsync(file.fileno())
        partial.replace(library)
    finally:
        partial.unlink(missing_ok=True)
    return library


def _source_key(flags: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for flag in flags:
        digest.update(flag.encode() + b"\0")
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _run(command: Sequence[str], timeout_s: float) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildFailed(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        first_lines = " / ".join(done.stderr.splitlines()[:3])
        raise BuildFailed(f"{command[0]} failed: {first_lines}")
