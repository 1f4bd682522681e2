"""A known prefix is neither computed nor sent again, on either worker, and changes no token."""

from __future__ import annotations

from pathlib import Path

from tests.end_to_end.local_cluster import LocalCluster, local_cluster, wait_until

SYSTEM = [(5 * i) % 250 for i in range(200)]
QUESTIONS = [[*SYSTEM, n, n + 1, n + 2] for n in range(6)]


async def test_a_shared_prefix_is_computed_and_sent_once(tiny_model: Path) -> None:
    async with (
        local_cluster(tiny_model) as cluster,
        local_cluster(tiny_model, prefill=0, decode=0, colocated=1) as alone,
    ):
        answers, moved = [], []
        for question in QUESTIONS:
            before = (await cluster.decode_status()).counters["kv_transfer_bytes_total"]
            answers.append(await cluster.generate(question, max_tokens=24, ignore_eos=True))
            moved.append((await cluster.decode_status()).counters["kv_transfer_bytes_total"] - before)
        cached = [answer.usage.cached_tokens for answer in answers]
        assert cached == [0] + [192] * 5  # twelve whole blocks of 16
        assert moved[1] == moved[0] * 11 // 203  # the 11 tokens after them
        expected = [await alone.generate(question, max_tokens=24, ignore_eos=True) for question in QUESTIONS]
        assert [list(answer.token_ids) for answer in answers] == [list(answer.token_ids) for answer in expected]
        assert [answer.usage.cached_tokens for answer in expected] == cached
        await cluster.wait_all_free()


async def test_the_same_prompt_again_still_computes_its_last_token(tiny_model: Path) -> None:
    async with local_cluster(tiny_model) as cluster:
        for length in (1, 16, 17, 32):
            first = await cluster.generate(SYSTEM[:length], max_tokens=8, ignore_eos=True)
            again = await cluster.generate(SYSTEM[:length], max_tokens=8, ignore_eos=True)
            assert list(again.token_ids) == list(first.token_ids)
            assert again.usage.cached_tokens == (length - 1) // 16 * 16
        await cluster.wait_all_free()


async def test_the_decode_worker_lacks_what_only_the_prefill_worker_caches(tiny_model: Path) -> None:
    """With max_tokens=1 only the prefill worker sees the prompt; its cached part must still reach the decode worker."""
    async with local_cluster(tiny_model) as cluster:
        await cluster.generate(SYSTEM, max_tokens=1)
        again = await cluster.generate(SYSTEM, max_tokens=24, ignore_eos=True)
        assert again.usage.cached_tokens == 192
        async with local_cluster(tiny_model, prefill=0, decode=0, colocated=1) as alone:
            expected = await alone.generate(SYSTEM, max_tokens=24, ignore_eos=True)
        assert list(again.token_ids) == list(expected.token_ids)


async def test_the_router_hears_what_each_worker_caches(tiny_model: Path) -> None:
    async with local_cluster(tiny_model, sections={"transfer": {"self_test": False}}) as cluster:
        await cluster.generate(SYSTEM, max_tokens=24, ignore_eos=True)

        async def heard() -> bool:
            return await _num_cached(cluster) == {"prefill-0": 12, "decode-0": 13}  # 223 tokens computed on decode

        await wait_until(heard, 5, "the router has heard of every cached block")


async def _num_cached(cluster: LocalCluster) -> dict[str, int]:
    return {worker.hello.worker_id: worker.num_cached_blocks for worker in (await cluster.cluster_status()).workers}
