"""Two API keys on one cluster: the same answers, and neither learns from the prefix cache what the other asked."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.local_cluster import LocalCluster, local_cluster

PROMPT = [(7 * i) % 250 for i in range(100)]
WHOLE_BLOCKS = 96


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys.jsonl"
    lines = [json.dumps({"name": key, "sha256": sha256(key.encode()).hexdigest()}) for key in ("alice", "bob")]
    path.write_text("\n".join(lines))
    return path


async def ask(cluster: LocalCluster, key: str) -> tuple[str, int]:
    """The answer's text, and how many prompt tokens were found in a cache."""
    body: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 8, "ignore_eos": True}
    response = await cluster.http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
    assert response.status_code == 200, response.text
    answer = response.json()
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("pools", [{}, {"prefill": 0, "decode": 0, "colocated": 1}], ids=["pair", "colocated"])
async def test_tenants_never_find_each_others_prompts_in_a_cache(
    tiny_model: Path, keys: Path, pools: dict[str, int]
) -> None:
    async with local_cluster(tiny_model, sections={"router": {"api_keys_file": str(keys)}}, **pools) as cluster:
        text, cached = await ask(cluster, "alice")
        assert cached == 0
        assert await ask(cluster, "alice") == (text, WHOLE_BLOCKS)
        assert await ask(cluster, "bob") == (text, 0)
        assert await ask(cluster, "bob") == (text, WHOLE_BLOCKS)
        assert (await cluster.http.post("/v1/completions", json={"prompt": "Hi"})).status_code == 401
        await cluster.wait_all_free()


async def test_tenants_share_a_cache_where_that_is_configured(tiny_model: Path, keys: Path) -> None:
    router = {"api_keys_file": str(keys), "share_prefix_cache": True}
    async with local_cluster(tiny_model, sections={"router": router}) as cluster:
        text, _ = await ask(cluster, "alice")
        assert await ask(cluster, "bob") == (text, WHOLE_BLOCKS)
