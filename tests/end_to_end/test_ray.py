"""The whole path with every member a Ray actor."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.cluster.pdserve_process import pdserve
from tests.end_to_end.local_cluster import local_cluster

PROMPT = "The quick brown fox jumps over the lazy dog."


@pytest.mark.slow
async def test_a_pair_on_ray_answers_as_the_colocated_engine_does(tiny_model: Path, tmp_path: Path) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text(
        f"model: {{source: {tiny_model}, name: tiny, dtype: float32}}\n"
        "router: {http_port: 0, grpc_port: 0, control_port: 0}\n"
        "prefill: {kv_cache_gib: 0.02}\n"
        "decode: {kv_cache_gib: 0.02}\n"
    )
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 16, "temperature": 0}
    async with pdserve("up", "--ray", "--config", str(config), logs=tmp_path / "logs") as up:
        url = await up.url()
        async with httpx.AsyncClient(timeout=60) as client:
            response = await client.post(f"{url}/v1/completions", json=body)
        assert response.status_code == 200, response.text
        assert await up.stop() == 0
        assert await up.errors() == ""
    async with local_cluster(tiny_model, prefill=0, decode=0, colocated=1) as colocated:
        expected = await colocated.complete(PROMPT, max_tokens=16)
    assert response.json()["choices"][0]["text"] == expected["choices"][0]["text"]
    assert response.json()["usage"] == expected["usage"]
