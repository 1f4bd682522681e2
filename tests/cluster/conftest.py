from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.end_to_end.tiny_model import save_tiny_model


@pytest.fixture(scope="session")
def tiny_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A serve.yaml that serves the tiny model in float32, on ports of its own choice."""
    model = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    path = tmp_path_factory.mktemp("config") / "serve.yaml"
    path.write_text(
        f"model: {{source: {model}, name: tiny, dtype: float32}}\n"
        "router: {http_port: 0, grpc_port: 0, control_port: 0, metrics_port: 0}\n"
        "prefill: {kv_cache_gib: 0.02}\n"
        "decode: {kv_cache_gib: 0.02}\n"
    )
    return path


@pytest.fixture
def thrifty_config(tiny_config: Path, tmp_path: Path) -> Path:
    """The same, for many workers at once: on a cluster each would take all the cores of its node, which here is one."""
    tree = yaml.safe_load(tiny_config.read_text())
    for role in ("prefill", "decode"):
        tree[role]["num_threads"] = 1
    path = tmp_path / "thrifty.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path
