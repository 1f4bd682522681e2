"""Who computes a prompt: whoever it is, the tokens are the same, and the client is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.local_cluster import LocalCluster, local_cluster, wait_until

PROMPT = list(range(1, 60))


async def answers(cluster: LocalCluster) -> tuple[list[int], str]:
    answer = await cluster.generate(PROMPT, max_tokens=12, ignore_eos=True)
    return list(answer.token_ids), answer.timings.placement


@pytest.mark.parametrize(("setting", "placement"), [("always", "prefill: disaggregated"), ("never", "decode: never")])
async def test_the_setting_decides_and_changes_no_token(tiny_model: Path, setting: str, placement: str) -> None:
    async with local_cluster(tiny_model, prefill=0, decode=0, colocated=1) as cluster:
        expected, colocated = await answers(cluster)
        assert colocated == "decode: colocated_worker"
    async with local_cluster(tiny_model, sections={"router": {"disaggregation": setting}}) as cluster:
        assert await answers(cluster) == (expected, placement)
        metrics = (await cluster.http.get("/metrics")).text
        computed_by, _, reason = placement.partition(": ")
        assert f'placements_total{{computed_by="{computed_by}",reason="{reason}"}} 1.0' in metrics
        await cluster.wait_all_free()


async def test_decode_workers_serve_alone_when_the_last_prefill_worker_has_gone(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.server.LONE_DECODE_S", {"auto": 0.0})
    async with local_cluster(tiny_model, sections={"router": {"disaggregation": "auto"}}) as cluster:
        expected, placement = await answers(cluster)
        assert placement == "prefill: disaggregated"
        await cluster.prefill[0].stop()

        async def is_gone() -> bool:
            return len((await cluster.cluster_status()).workers) == 1

        await wait_until(is_gone, 10, "the prefill worker has left")
        assert (await cluster.cluster_status()).is_ready
        assert await answers(cluster) == (expected, "decode: no_prefill_worker")


async def test_a_deadline_that_cannot_be_met_is_refused_with_the_prediction(tiny_model: Path) -> None:
    sections = {"slo": {"ttft_s": 1e-5}}
    pool = {"max_num_batched_tokens": 32}
    async with local_cluster(tiny_model, sections=sections, pool=pool) as cluster:

        async def has_measured() -> bool:
            """The self-test's prompt is the first."""
            workers = (await cluster.cluster_status()).workers
            return any(worker.load.prefill_s_per_token > 0 for worker in workers)

        await wait_until(has_measured, 10, "a heartbeat tells how fast prompts are computed")
        response = await cluster.http.post("/v1/completions", json={"prompt": PROMPT[::-1], "max_tokens": 4})
        assert response.status_code == 429
        assert response.json()["error"]["code"] == "would_miss_deadline"
        assert "the first token would come" in response.json()["error"]["message"]
        assert int(response.headers["Retry-After"]) >= 1
        await cluster.wait_all_free()
