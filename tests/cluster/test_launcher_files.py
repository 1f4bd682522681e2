"""cluster.yaml and cluster/local.yaml, held against Ray's own schema and command line, and against what we promise."""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import fillout_defaults, prepare_config, validate_config
from ray.scripts.scripts import start

from common.config import Role

ROOT = Path(__file__).parent.parent.parent
CLOUD, LOCAL = ROOT / "cluster.yaml", ROOT / "cluster/local.yaml"
COMMAND_LISTS = (
    "setup_commands",
    "head_setup_commands",
    "worker_setup_commands",
    "initialization_commands",
    "head_start_ray_commands",
    "worker_start_ray_commands",
)
both = pytest.mark.parametrize("path", [CLOUD, LOCAL], ids=["cloud", "local"])


def load(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def commands(path: Path) -> list[str]:
    config = load(path)
    return [command for key in COMMAND_LISTS for command in config.get(key, [])]


def ray_start(path: Path, key: str) -> list[str]:
    """The words of the one command in a list that starts Ray."""
    (command,) = [command for command in load(path)[key] if "ray start" in command]
    return shlex.split(command)


@both
def test_ray_takes_the_file(path: Path) -> None:
    config = load(path)
    validate_config(prepare_config(config) if path == LOCAL else fillout_defaults(config))


@both
def test_no_command_of_rays_own_is_run(path: Path) -> None:
    with_defaults = fillout_defaults(load(path))
    assert {command for key in COMMAND_LISTS for command in with_defaults[key]} == set(commands(path))


@both
@pytest.mark.parametrize("key", ["head_start_ray_commands", "worker_start_ray_commands"])
def test_ray_knows_every_option_that_it_is_started_with(path: Path, key: str) -> None:
    known = {name for parameter in start.params for name in parameter.opts}
    given = {word.partition("=")[0] for word in ray_start(path, key) if word.startswith("--")}
    assert given
    assert given <= known


@both
def test_nothing_is_opened_to_the_network_without_a_token(path: Path) -> None:
    head, worker = (ray_start(path, f"{kind}_start_ray_commands") for kind in ("head", "worker"))
    assert "RAY_AUTH_MODE=token" in head
    assert "RAY_AUTH_MODE=token" in worker
    assert "--include-dashboard=false" in head
    assert "0.0.0.0" not in "".join(commands(path))
    assert load(path)["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"


@both
def test_what_the_hosts_are_sent_is_there_and_is_all_that_is_installed(path: Path) -> None:
    sent = {source for source in load(path)["file_mounts"].values() if not source.startswith("~")}
    assert [source for source in sent if not (ROOT / source).exists()] == []
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    assert {package.partition(".")[0] for package in packages} <= sent
    assert {"Makefile", "pyproject.toml", "constraints.txt", "README.md", "serve.yaml"} <= sent


@both
def test_every_program_that_a_command_names_exists(path: Path) -> None:
    named = re.findall(r"(?:~/pdserve/)?\.venv/bin/([\w-]+)", " ".join(commands(path)))
    assert {"ray", "python"} <= set(named)
    assert [program for program in named if not (Path(sys.prefix) / "bin" / program).exists()] == []
    modules = re.findall(r"-m ([\w.]+)", " ".join(commands(path)))
    ours = [module for module in modules if module != "pip"]
    assert [module for module in ours if not (ROOT / f"{module.replace('.', '/')}.py").exists()] == []


@both
def test_the_head_announces_exactly_the_roles_that_nodes_join_for(path: Path) -> None:
    (label,) = [word for word in ray_start(path, "head_start_ray_commands") if word.startswith("--labels=")]
    assert set(label.removeprefix("--labels=pdserve-roles=").split(".")) == roles(path)


@both
def test_every_role_is_one_that_pdserve_places_workers_by(path: Path) -> None:
    assert roles(path) <= {str(role) for role in Role}
    assert {"prefill", "decode"} <= roles(path)


def roles(path: Path) -> set[str]:
    """The custom resources, which are what cluster/ray_host.py places workers by."""
    if path == LOCAL:
        return {role for role, _ in local_roles()}
    resources = [set(kind["resources"]) for kind in load(CLOUD)["available_node_types"].values()]
    return set().union(*resources) - {"CPU", "GPU"}


def local_roles() -> list[tuple[str, list[str]]]:
    words = ray_start(LOCAL, "worker_start_ray_commands")
    named = [re.match(r"([a-z]+)=([\d.,]+)\)?$", word) for word in words]
    return [(match[1], match[2].split(",")) for match in named if match]


def test_every_local_host_has_a_role() -> None:
    provider = load(LOCAL)["provider"]
    named = {host for _, hosts in local_roles() for host in hosts}
    assert named == set(provider["worker_ips"])
    assert provider["head_ip"] not in named


def test_each_cloud_node_type_has_one_role_and_the_head_none() -> None:
    config = load(CLOUD)
    types = dict(config["available_node_types"])
    assert types.pop(config["head_node_type"])["resources"] == {"CPU": 0}
    assert all(len(kind["resources"]) == 1 for kind in types.values())


def test_decode_nodes_are_never_taken_away_by_the_spot_market() -> None:
    for name, kind in load(CLOUD)["available_node_types"].items():
        is_spot = "InstanceMarketOptions" in kind["node_config"]
        assert is_spot == (name == "prefill-spot")
