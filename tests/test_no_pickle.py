"""Nothing that pdserve receives can run code: no pickle, and none of what pickles on the quiet. Read from the source.

The one exception is Ray's own: it pickles the order for an actor on its way there, so an order holds plain values only,
and Ray asks whoever calls it for a token.
"""

import ast
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path

import pytest
from pydantic import BaseModel

from cluster.host import MemberSpec
from cluster.ray_actor import MemberOrder
from common.config import Role, ServeConfig
from tests.test_imports import MAY_IMPORT, files_of, imports_of, top

PICKLING_MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "cloudpickle",
    "dill",
    "marshal",
    "shelve",
    "joblib",
    "multiprocessing",
}
PICKLING_CALLS = {
    *("torch.load", "torch.save", "torch.jit.load", "torch.package", "np.load", "numpy.load"),
    *("yaml.load", "yaml.unsafe_load", "yaml.full_load"),
    *("eval", "exec"),
}
# torch.distributed's collectives of objects, by whatever name the module goes
OBJECT_COLLECTIVES = {
    *("send_object_list", "recv_object_list", "broadcast_object_list", "scatter_object_list"),
    *("all_gather_object", "gather_object"),
}


def calls_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            yield node.lineno, ast.unparse(node)


def unpickling(source: str) -> list[str]:
    return [
        f"{line}: {name}"
        for line, name in calls_of(ast.parse(source))
        if name in PICKLING_CALLS or name.rpartition(".")[2] in OBJECT_COLLECTIVES
    ]


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_no_package_imports_what_pickles(package: str) -> None:
    assert [str(i) for file in files_of(package) for i in imports_of(file) if top(i.module) in PICKLING_MODULES] == []


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_no_package_calls_what_unpickles(package: str) -> None:
    found = {str(file): unpickling(file.read_text(encoding="utf-8")) for file in files_of(package)}
    assert {file: lines for file, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    ["torch.load(path)", "dist.all_gather_object(x, y)", "d.broadcast_object_list(x)", "yaml.load(t, L)", "eval(t)"],
)
def test_the_search_finds_what_it_looks_for(source: str) -> None:
    assert unpickling(source)


def test_what_travels_to_a_ray_actor_is_plain_values() -> None:
    order = MemberOrder(MemberSpec("decode-0", Role.DECODE), ServeConfig(), "127.0.0.1:8002", Path("log"))
    assert list(kinds_in(order)) == []


def kinds_in(value: object) -> Iterator[type]:
    """Every type in it that is neither plain nor made of plain ones alone."""
    if is_dataclass(value):
        for field in fields(value):
            yield from kinds_in(getattr(value, field.name))
    elif isinstance(value, BaseModel):
        for _, inner in value:
            yield from kinds_in(inner)
    elif not isinstance(value, str | int | float | bytes | Path | Enum | None):
        yield type(value)
