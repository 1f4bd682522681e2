"""Workers that leave in order, freeze and come back; routers that share workers, drain, and start again."""

from __future__ import annotations

import asyncio
import signal
from functools import partial
from pathlib import Path

import grpc
import httpx
import pytest

from common.pb import serving_pb2 as pb
from router.server import RouterServer
from tests.end_to_end.local_cluster import LocalCluster, local_cluster, wait_until
from tests.end_to_end.worker_process import worker_process

PROMPTS = [[(3 * n + i) % 250 for i in range(60 + n)] for n in range(8)]
NUM_TOKENS = 400


async def answers(cluster: LocalCluster, router: int = 0) -> list[pb.GenerateResponse]:
    requests = [
        cluster.generate(prompt, router=router, max_tokens=NUM_TOKENS, ignore_eos=True, temperature=1.0, seed=index)
        for index, prompt in enumerate(PROMPTS)
    ]
    return list(await asyncio.gather(*requests))


def tokens(responses: list[pb.GenerateResponse]) -> list[list[int]]:
    return [list(response.token_ids) for response in responses]


async def reason_of(cluster: LocalCluster, worker_id: str, router: int = 0) -> str | None:
    """Why the worker gets no work; empty if it does, None if it is no member."""
    workers = (await cluster.cluster_status(router)).workers
    return next((worker.unfit_reason for worker in workers if worker.hello.worker_id == worker_id), None)


async def is_fit(cluster: LocalCluster, worker_id: str) -> bool:
    """Both as of one moment: one that has just come is fit, and its pairs are not checked yet."""
    status = await cluster.cluster_status()
    is_there = any(each.hello.worker_id == worker_id and not each.unfit_reason for each in status.workers)
    return is_there and all(pair.standing == pb.PAIR_GOOD for pair in status.pairs)


async def is_running(cluster: LocalCluster, worker_id: str) -> bool:
    workers = (await cluster.cluster_status()).workers
    return any(worker.num_assigned for worker in workers if worker.hello.worker_id == worker_id)


@pytest.mark.parametrize("timeout_s", [0.05, 60.0])
async def test_a_decode_worker_that_drains_under_load_loses_no_request(tiny_model: Path, timeout_s: float) -> None:
    async with local_cluster(tiny_model, decode=2) as cluster:
        expected = tokens(await answers(cluster))
        under_load = asyncio.create_task(answers(cluster))
        await wait_until(partial(is_running, cluster, "decode-0"), 20, "decode-0 is busy")
        await cluster.drain("decode-0", timeout_s)
        assert await reason_of(cluster, "decode-0") == "draining"
        drained = await under_load
        assert tokens(drained) == expected
        assert all(response.usage.completion_tokens == NUM_TOKENS for response in drained)
        assert all(response.timings.attempts == 1 for response in drained)  # nothing has failed
        await asyncio.wait_for(cluster.decode[0].wait_drained(), 20)
        await cluster.wait_all_free()
        later = await answers(cluster)
        assert {response.timings.decode_worker for response in later} == {"decode-1"}
        assert tokens(later) == expected


async def test_a_prefill_worker_that_drains_under_load_loses_no_request(tiny_model: Path) -> None:
    async with local_cluster(tiny_model) as cluster:
        expected = tokens(await answers(cluster))
    async with local_cluster(tiny_model, prefill=2, sections={"prefill": {"max_num_batched_tokens": 4}}) as cluster:
        under_load = asyncio.create_task(answers(cluster))
        await wait_until(partial(is_running, cluster, "prefill-0"), 20, "prefill-0 is busy")
        await cluster.drain("prefill-0", 0.01)
        assert tokens(await under_load) == expected
        await asyncio.wait_for(cluster.prefill[0].wait_drained(), 20)
        await cluster.wait_all_free()
        assert {response.timings.prefill_worker for response in await answers(cluster)} == {"prefill-1"}


async def test_only_a_worker_that_is_there_can_be_drained(tiny_model: Path) -> None:
    async with local_cluster(tiny_model) as cluster:
        with pytest.raises(grpc.aio.AioRpcError, match="no worker here is called decode-7; there are: decode-0, pre"):
            await cluster.drain("decode-7")
        await cluster.drain("decode-0")
        refused = await cluster.http.post("/v1/completions", json={"model": "tiny", "prompt": "hi"})
        assert refused.status_code == 503
        assert "decode-0: draining" in refused.json()["error"]["message"]


@pytest.mark.slow
async def test_sigterm_lets_a_worker_hand_over_what_it_has_and_exit_with_status_zero(
    tiny_model: Path, tmp_path: Path
) -> None:
    sections = {"decode": {"drain_timeout_s": 0.05}}
    async with local_cluster(tiny_model, decode=0, sections=sections) as cluster:
        start = partial(worker_process, "decode_worker", config=cluster.config, folder=tmp_path)
        async with start(name="decode-0", router_address=cluster.router.control_address) as leaving:
            await wait_until(partial(is_fit, cluster, "decode-0"), 60, "decode-0 has joined")
            expected = tokens(await answers(cluster))
            under_load = asyncio.create_task(answers(cluster))
            await wait_until(partial(is_running, cluster, "decode-0"), 20, "decode-0 is busy")
            async with start(name="decode-1", router_address=cluster.router.control_address):
                await wait_until(partial(is_fit, cluster, "decode-1"), 60, "decode-1 has joined")
                leaving.terminate()
                assert await asyncio.wait_for(leaving.wait(), 30) == 0
                assert tokens(await under_load) == expected
                assert await reason_of(cluster, "decode-0") is None


@pytest.mark.slow
async def test_a_worker_that_was_frozen_is_out_and_comes_back_as_it_was(tiny_model: Path, tmp_path: Path) -> None:
    async with local_cluster(tiny_model, decode=1) as cluster:
        expected = tokens(await answers(cluster))
        router = cluster.router.control_address
        async with worker_process("decode_worker", "decode-1", cluster.config, router, tmp_path) as process:
            await wait_until(partial(is_fit, cluster, "decode-1"), 60, "decode-1 has joined")
            under_load = asyncio.create_task(answers(cluster))
            await wait_until(partial(is_running, cluster, "decode-1"), 20, "decode-1 is busy")
            process.send_signal(signal.SIGSTOP)
            assert tokens(await under_load) == expected

            async def is_out() -> bool:
                return await reason_of(cluster, "decode-1") is None

            await wait_until(is_out, 20, "decode-1 is out")
            assert tokens(await answers(cluster)) == expected
            process.send_signal(signal.SIGCONT)
            await wait_until(partial(is_fit, cluster, "decode-1"), 30, "decode-1 is back")
            again = await answers(cluster)
            assert tokens(again) == expected
            assert {response.timings.decode_worker for response in again} == {"decode-0", "decode-1"}
        await cluster.wait_all_free()


async def test_a_router_that_starts_again_finds_workers_and_their_caches(tiny_model: Path) -> None:
    async with local_cluster(tiny_model, decode=2) as cluster:
        before = await answers(cluster)
        known = await _cached_blocks(cluster)
        assert all(known.values())
        await cluster.router.stop()
        port = int(cluster.router.control_address.rpartition(":")[2])
        section = cluster.config.router.model_copy(update={"control_port": port})
        cluster.routers[0] = await RouterServer.start(cluster.config.model_copy(update={"router": section}))
        try:

            async def is_whole() -> bool:
                pairs = (await cluster.cluster_status()).pairs
                return len(pairs) == 2 and all(pair.standing == pb.PAIR_GOOD for pair in pairs)

            await wait_until(is_whole, 20, "the router is whole again")

            async def knows_as_much() -> bool:
                now = await _cached_blocks(cluster)
                return all(now[worker] >= num_blocks for worker, num_blocks in known.items())

            await wait_until(knows_as_much, 5, "it knows what the caches hold")
            after = await answers(cluster)
            assert tokens(after) == tokens(before)
            assert all(response.usage.cached_tokens > 0 for response in after)
        finally:
            await cluster.router.stop()


async def test_two_routers_serve_from_the_same_workers_and_both_know_their_caches(tiny_model: Path) -> None:
    async with local_cluster(tiny_model, decode=2, routers=2) as cluster:
        first, second = await asyncio.gather(answers(cluster, 0), answers(cluster, 1))
        assert tokens(first) == tokens(second)

        async def agree() -> bool:
            one, other = await _cached_blocks(cluster, 0), await _cached_blocks(cluster, 1)
            return one == other and all(one.values())

        await wait_until(agree, 5, "both know the same of all caches")
        await cluster.drain("decode-0", router=1)

        async def is_known_to_drain() -> bool:
            return await reason_of(cluster, "decode-0", 0) == "draining"

        await wait_until(is_known_to_drain, 5, "the worker has told the other router")
        await cluster.routers[1].stop()
        later = await answers(cluster, 0)
        assert tokens(later) == tokens(first)
        assert {response.timings.decode_worker for response in later} == {"decode-1"}
        await cluster.wait_all_free()


async def test_a_router_that_drains_finishes_what_runs_and_takes_nothing_new(tiny_model: Path) -> None:
    async with local_cluster(tiny_model) as cluster:
        body = {"model": "tiny", "prompt": "hi", "max_tokens": 1500, "ignore_eos": True}
        http = asyncio.create_task(cluster.http.post("/v1/completions", json={**body, "stream": True}))
        rpc = asyncio.create_task(cluster.generate(PROMPTS[0], max_tokens=1500, ignore_eos=True))

        async def both_run() -> bool:
            return (await cluster.decode_status()).load.num_running == 2

        await wait_until(both_run, 20, "both run")
        cluster.router.begin_drain()
        cluster.router.begin_drain()
        await asyncio.sleep(0)
        async with httpx.AsyncClient(base_url=cluster.router.http_url) as client:

            async def is_closed() -> bool:
                try:
                    return (await client.post("/v1/completions", json=body)).status_code == 503
                except httpx.TransportError:
                    return True

            await wait_until(is_closed, 5, "nothing new is taken")
        assert (await http).text.strip().endswith("data: [DONE]")
        assert len((await rpc).token_ids) == 1500
        await asyncio.wait_for(cluster.router.wait_drained(), 10)
        await cluster.wait_all_free()


async def test_answers_that_outlast_a_routers_drain_end_with_a_typed_error(tiny_model: Path) -> None:
    async with local_cluster(tiny_model, sections={"router": {"drain_timeout_s": 0.1}}) as cluster:
        body = {"model": "tiny", "prompt": "hi", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        running = asyncio.create_task(cluster.http.post("/v1/completions", json=body))

        async def runs() -> bool:
            return (await cluster.decode_status()).load.num_running == 1

        await wait_until(runs, 20, "it runs")
        cluster.router.begin_drain()
        await asyncio.wait_for(cluster.router.wait_drained(), 20)
        await cluster.router.stop()
        assert "worker_draining" in (await running).text
        await cluster.wait_all_free()


async def _cached_blocks(cluster: LocalCluster, router: int = 0) -> dict[str, int]:
    status = await cluster.cluster_status(router)
    return {worker.hello.worker_id: worker.num_cached_blocks for worker in status.workers}
