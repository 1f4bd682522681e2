"""Imports go one way, and each process loads only what its role needs. Read from the source, not from running it."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

MAY_IMPORT = {
    "common": set(),
    "engine": {"common"},
    "kv_transfer": {"common"},
    "prefill_worker": {"common", "engine", "kv_transfer"},
    "decode_worker": {"common", "engine", "kv_transfer"},
    "router": {"common"},
    "cluster": {"common", "engine", "kv_transfer", "prefill_worker", "decode_worker", "router"},
}
COMPUTE_LIBRARIES = {"torch", "numpy", "safetensors", "transformers", "grpc", "google"}
LOADED_ON_DEMAND = {"gguf", "flash_attn", "triton", "xxhash", "nixl"}  # not before they are needed


@dataclass(frozen=True)
class Import:
    file: Path
    line: int
    module: str
    is_at_module_level: bool

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line} imports {self.module}"


def imports_of(file: Path) -> Iterator[Import]:
    def walk(node: ast.AST, is_at_module_level: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                yield from walk(child, False)
            elif isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(file, child.lineno, alias.name, is_at_module_level)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{file}:{child.lineno}: a relative import"
                for alias in child.names:
                    yield Import(file, child.lineno, f"{child.module}.{alias.name}", is_at_module_level)
            else:
                is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                yield from walk(child, is_at_module_level and not is_function)

    yield from walk(ast.parse(file.read_text(encoding="utf-8")), True)


def files_of(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def top(module: str) -> str:
    return module.partition(".")[0]


def file_of(module: str) -> Path | None:
    """The file of a first-party module, or of the module that a `from` import takes a name from."""
    parts = module.split(".")
    for length in (len(parts), len(parts) - 1):
        path = ROOT.joinpath(*parts[:length])
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if length and candidate.is_file():
                return candidate
    return None


def loaded_with(package: str) -> Iterator[Import]:
    """Every import, in functions too, of `package`, and every one at module level of what it imports from below."""
    pending, seen = files_of(package), set()
    while pending:
        file = pending.pop()
        if file in seen:
            continue
        seen.add(file)
        for found in imports_of(file):
            if not found.is_at_module_level and not file.is_relative_to(ROOT / package):
                continue
            yield found
            if top(found.module) in MAY_IMPORT and (imported := file_of(found.module)) is not None:
                pending.append(imported)


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_only_the_layers_below_it(package: str) -> None:
    allowed = MAY_IMPORT[package] | {package}
    files = files_of(package)
    assert files
    wrong = [
        str(found)
        for file in files
        for found in imports_of(file)
        if top(found.module) in MAY_IMPORT and top(found.module) not in allowed
    ]
    assert wrong == []


@pytest.mark.parametrize("package", ["engine", "kv_transfer"])
def test_the_computing_layers_use_computing_libraries_only(package: str) -> None:
    """With what they use of common, they run where neither pydantic nor a web framework nor Ray is installed."""
    allowed = COMPUTE_LIBRARIES | LOADED_ON_DEMAND | set(MAY_IMPORT) | sys.stdlib_module_names
    assert sorted({str(found) for found in loaded_with(package) if top(found.module) not in allowed}) == []


@pytest.mark.parametrize("package", ["common", "router"])
def test_common_and_router_never_import_torch(package: str) -> None:
    wrong = [str(found) for file in files_of(package) for found in imports_of(file) if top(found.module) == "torch"]
    assert wrong == []


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("router.server", ["torch", "ray", "engine", "kv_transfer", "opentelemetry.sdk"]),
        ("engine.build", ["pydantic", "fastapi", "ray", "gguf", "triton"]),
        ("kv_transfer.factory", ["pydantic", "fastapi", "ray", "gguf"]),
        ("prefill_worker.server", ["fastapi", "uvicorn", "opentelemetry.sdk"]),
        ("cluster.cli", ["torch", "ray", "fastapi", "transformers"]),
    ],
)
def test_importing_a_module_leaves_what_it_does_not_need_unloaded(module: str, absent: list[str]) -> None:
    code = f"import sys, {module}; print(*sorted(set({absent!r}) & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []


def test_every_package_is_named_in_the_package_metadata() -> None:
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {
        ".".join(init.parent.relative_to(ROOT).parts)
        for package in MAY_IMPORT
        for init in (ROOT / package).rglob("__init__.py")
    }
    assert set(named) == found


def test_there_is_no_python_package_called_proto() -> None:
    """It would hide proto-plus, which google's own libraries import by that name."""
    assert not (ROOT / "proto" / "__init__.py").exists()
