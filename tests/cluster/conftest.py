from __future__ import annotations

from pathlib import Path

import pytest

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
