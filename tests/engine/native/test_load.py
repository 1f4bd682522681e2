"""Building and loading: the cache, several processes at once, and every way in which there are no kernels."""

from __future__ import annotations

import _ctypes
import hashlib
import logging
import os
import pwd
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.native import build, load
from engine.native.build import FLAGS, BuildFailed, build_library, compile_library, default_cache
from engine.native.kernels import NativeKernels
from engine.native.load import load_native


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A g++ of the test's own, the only compiler on the path; it writes "built" wherever it is told to."""
    tools = tmp_path / "tools"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    return write_compiler(tools / "g++", 'for last; do :; done; echo built > "$last"; echo >> "$0.calls"')


def write_compiler(path: Path, compile_command: str) -> Path:
    path.write_text(f"#!/bin/sh\n{compile_command}\n")
    path.chmod(0o755)
    return path


def num_compilations(compiler: Path) -> int:
    calls = Path(f"{compiler}.calls")
    return len(calls.read_text().splitlines()) if calls.exists() else 0


def test_a_second_build_finds_the_first(compiler: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert build_library(cache) == build_library(cache)
    assert num_compilations(compiler) == 1
    assert [path.suffix for path in cache.iterdir()] == [".so"]


def test_a_library_that_is_there_needs_no_compiler(compiler: Path, tmp_path: Path) -> None:
    library = build_library(tmp_path / "cache")
    compiler.unlink()
    assert build_library(tmp_path / "cache") == library


def test_other_flags_or_another_source_are_another_library(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build_library(tmp_path)
    other_flags = build_library(tmp_path, (*FLAGS, "-g"))
    sources = tmp_path / "src"
    sources.mkdir()
    (sources / build.MAIN).write_text("int other;")
    monkeypatch.setattr(build, "SOURCES", sources)
    assert len({first, other_flags, build_library(tmp_path)}) == 3


@pytest.mark.parametrize("damaged", [b"", b"bui", b"garbage", b"built\n\0"])
def test_a_damaged_library_is_deleted_and_compiled_anew(compiler: Path, tmp_path: Path, damaged: bytes) -> None:
    library = build_library(tmp_path / "cache")
    library.write_bytes(damaged)
    assert build_library(tmp_path / "cache") == library
    assert library.read_bytes() == b"built\n"
    assert num_compilations(compiler) == 2


def test_a_damaged_library_is_deleted_where_there_is_no_compiler_too(compiler: Path, tmp_path: Path) -> None:
    build_library(tmp_path / "cache").write_bytes(b"")
    compiler.unlink()
    with pytest.raises(BuildFailed, match=r"no C\+\+ compiler"):
        build_library(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_compiler_that_fails_is_named_with_its_first_words(compiler: Path, tmp_path: Path) -> None:
    write_compiler(compiler, "echo 'unknown option -mavx512bf16' >&2; exit 1")
    with pytest.raises(BuildFailed, match=r"g\+\+ failed: unknown option -mavx512bf16"):
        build_library(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_without_a_compiler_there_are_no_kernels_and_one_line_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True, "avx512_vbmi": True})
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [load_native(n, tmp_path / "cache") for n in (1, 2, 1)] == [None, None, None]
    assert [record.getMessage() for record in caplog.records] == [
        "native kernels are off: there is no C++ compiler (g++, c++, clang++)"
    ]


def test_without_the_instructions_there_are_no_kernels_and_nothing_is_compiled(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True, "avx512_vbmi": False})
    assert load_native(1, tmp_path / "cache") is None
    assert [record.getMessage() for record in caplog.records] == [
        "native kernels are off: this CPU has not both AVX512-BF16 and AVX512-VBMI"
    ]
    assert num_compilations(compiler) == 0


def test_a_library_that_cannot_be_loaded_is_no_crash(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The stand-in compiler's "built" is no shared library: it is compiled once more, then one line says so."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True, "avx512_vbmi": True})
    assert [load_native(1, tmp_path / "cache") for _ in range(2)] == [None, None]
    assert num_compilations(compiler) == 2
    [record] = caplog.records
    assert "invalid ELF header" in record.getMessage() or "file too short" in record.getMessage()


def test_a_cache_that_cannot_be_written_is_no_crash(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True, "avx512_vbmi": True})
    (tmp_path / "file").write_text("not a folder")
    assert load_native(1, tmp_path / "file" / "cache") is None
    assert "cannot be written: Not a directory" in caplog.text


def test_the_cache_is_where_the_system_keeps_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "pdserve" / "native"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache() == Path.home() / ".cache" / "pdserve" / "native"


@pytest.mark.parametrize("root", ["", "relative/path"])
def test_a_cache_folder_that_is_no_absolute_path_is_none(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", root)
    assert default_cache() == Path.home() / ".cache" / "pdserve" / "native"


@pytest.fixture
def temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What is left to a user without a home, whom the system does not know."""

    def unknown(number: int) -> None:
        raise KeyError(number)

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    load._library.cache_clear()
    yield tmp_path
    load._library.cache_clear()


def test_a_user_without_a_home_has_a_cache_of_their_own(temporary_files: Path) -> None:
    folder = temporary_files / f"pdserve-{os.getuid()}"
    assert default_cache() == default_cache() == folder / "pdserve" / "native"
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("kind", ["open to others", "a link", "a file"])
def test_a_temporary_folder_that_others_could_have_filled_is_not_used(
    kind: str, compiler: Path, temporary_files: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = temporary_files / f"pdserve-{os.getuid()}"
    if kind == "a file":
        folder.touch(mode=0o600)
    elif kind == "a link":
        (temporary_files / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(temporary_files / "elsewhere")
    else:
        folder.mkdir()
        folder.chmod(0o770)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True, "avx512_vbmi": True})
    assert load_native(1) is None
    assert num_compilations(compiler) == 0
    assert [record.levelname for record in caplog.records] == ["WARNING"]


LOAD_AND_MULTIPLY = (
    "import sys, torch; from pathlib import Path; from engine.native.load import load_native\n"
    "kernels = load_native(1, Path(sys.argv[1])); x = torch.eye(4).bfloat16()\n"
    "assert torch.equal(kernels.linear(x, kernels.pack_linear(x)), x)"
)


@pytest.mark.usefixtures("one_thread")
def test_a_library_that_was_cut_short_ends_no_process(tmp_path: Path) -> None:
    """It would with SIGBUS, at every start."""
    library = build_library(tmp_path)
    whole = library.read_bytes()
    os.truncate(library, len(whole) // 2)
    subprocess.run([sys.executable, "-c", LOAD_AND_MULTIPLY, str(tmp_path)], check=True, timeout=100)
    assert library.read_bytes() == whole


@pytest.mark.usefixtures("one_thread")
def test_another_library_of_that_name_is_replaced(tmp_path: Path) -> None:
    """Its bytes are what its name says, and it can be loaded; but it has none of the functions."""
    ours = compile_library(tmp_path)
    content = Path(_ctypes.__file__).read_bytes()
    other = ours.with_name(f"{ours.stem.rpartition('-')[0]}-{hashlib.sha256(content).hexdigest()[:16]}.so")
    other.write_bytes(content)
    ours.unlink()
    subprocess.run([sys.executable, "-c", LOAD_AND_MULTIPLY, str(tmp_path)], check=True, timeout=100)
    assert list(tmp_path.iterdir()) == [ours]


@pytest.mark.usefixtures("one_thread")  # skips where there can be no kernels
def test_processes_that_build_at_once_all_get_working_kernels(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LOAD_AND_MULTIPLY, str(tmp_path)]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    errors = [process.communicate(timeout=100)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], errors
    assert [path.suffix for path in tmp_path.iterdir()] == [".so"]


def test_an_idle_pool_takes_no_processor_time(two_threads: NativeKernels) -> None:
    x = torch.ones(8, 64).bfloat16()
    packed = two_threads.pack_linear(torch.ones(4096, 64).bfloat16())
    two_threads.linear(x, packed)
    before = os.times()
    with pytest.raises(subprocess.TimeoutExpired):  # half a second in which this process does nothing
        subprocess.run(["sleep", "5"], timeout=0.5)
    after = os.times()
    assert after.user + after.system - before.user - before.system < 0.1
    assert torch.equal(two_threads.linear(x, packed), torch.full((8, 4096), 64.0).bfloat16())


def test_kernels_of_several_owners_can_run_at_once(one_thread: NativeKernels) -> None:
    """Each has its own threads; more threads than cores and more pools than one are slow, never wrong."""
    x = torch.randn(33, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = torch.randn(640, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    packed = one_thread.pack_linear(weight)
    expected = one_thread.linear(x, packed)
    pools = [load_native(n) for n in (2, 3, 5)]
    for _ in range(200):
        for pool in pools:
            assert pool is not None
            assert torch.equal(pool.linear(x, packed), expected)
