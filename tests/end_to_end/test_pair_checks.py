"""The self-test: a pair is chosen once KV has gone through it and was what the decode worker computes itself."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

import prefill_worker.server
from common.config import ServeConfig
from common.engine_config import EngineConfig
from common.pb import serving_pb2 as pb
from engine.build import build_engine
from engine.engine import Engine
from kv_transfer.factory import make_sender
from prefill_worker.server import PrefillServer, SenderFactory
from tests.end_to_end.local_cluster import LocalCluster, local_cluster, wait_until
from tests.end_to_end.tiny_model import save_tiny_model
from tests.end_to_end.worker_process import worker_process
from tests.end_to_end.wrong_senders import (
    Spoil,
    faulty,
    heads_permuted,
    last_layer_negated,
    scaled,
    shifted_by_a_position,
    swapped,
)

PROMPT = list(range(40))


@asynccontextmanager
async def another_prefill_worker(
    cluster: LocalCluster, new_sender: SenderFactory = make_sender, config: ServeConfig | None = None
) -> AsyncIterator[PrefillServer]:
    """prefill-1, beside the cluster's own."""
    router = cluster.router.control_address
    server = await PrefillServer.start(config or cluster.config, "prefill-1", [router], new_sender)
    try:
        yield server
    finally:
        await server.stop()


async def pair_of(cluster: LocalCluster, prefill: str) -> pb.PairSummary | None:
    pairs = (await cluster.cluster_status()).pairs
    return next((pair for pair in pairs if pair.prefill_worker == prefill), None)


async def until_standing(cluster: LocalCluster, prefill: str, standing: pb.PairStanding) -> pb.PairSummary:
    async def stands() -> bool:
        pair = await pair_of(cluster, prefill)
        return pair is not None and pair.standing == standing

    await wait_until(stands, 20, f"the pair with {prefill} is {standing}")
    pair = await pair_of(cluster, prefill)
    assert pair is not None
    return pair


async def checks(cluster: LocalCluster, result: str) -> int:
    text = (await cluster.http.get("/metrics")).text
    prefix = f'pair_checks_total{{result="{result}"}} '
    return sum(int(float(line.removeprefix(prefix))) for line in text.splitlines() if line.startswith(prefix))


@pytest.mark.parametrize("transport", ["grpc", "torch_dist"])
async def test_an_honest_pair_passes_and_leaves_every_block_free(tiny_model: Path, transport: str) -> None:
    async with local_cluster(tiny_model, sections={"transfer": {"transport": transport}}) as cluster:
        assert (await cluster.cluster_status()).is_ready
        assert await checks(cluster, "passed") == 1
        assert (await cluster.decode_status()).counters["received_prefills"] == 0  # nobody's request
        await cluster.wait_all_free()


async def test_different_kernels_of_a_coarse_dtype_pass(tiny_model: Path) -> None:
    sections = {
        "model": {"dtype": "bfloat16"},
        "prefill": {"attention": "torch_reference", "max_num_batched_tokens": 8},
        "decode": {"attention": "cpu"},
    }
    async with local_cluster(tiny_model, sections=sections) as cluster:
        assert await checks(cluster, "passed") == 1


@pytest.mark.parametrize("wire_dtype", ["int8", "fp8"])
async def test_a_lossy_encoding_passes_within_its_tolerance(
    tiny_model: Path, wire_dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "router.pair_checker"):
        async with local_cluster(tiny_model, sections={"transfer": {"wire_dtype": wire_dtype}}) as cluster:
            assert await checks(cluster, "passed") == 1
            await cluster.wait_all_free()
    assert "a relative error of 0.0" in caplog.text  # a few percent: exact values would say "of 0,"


async def test_the_smallest_decode_worker_can_be_checked(tiny_model: Path) -> None:
    sections = {"decode": {"kv_cache_gib": 4 * 16 * 512 / 2**30}}  # four blocks of 16 tokens
    async with local_cluster(tiny_model, sections=sections) as cluster:
        assert (await cluster.decode_status()).load.total_blocks == 4
        assert await checks(cluster, "passed") == 1
        await cluster.wait_all_free()


async def test_workers_of_unlike_dtypes_are_a_pair_where_the_encoding_is_neither(tiny_model: Path) -> None:
    async with local_cluster(tiny_model, prefill=0, sections={"transfer": {"wire_dtype": "int8"}}) as cluster:
        model = cluster.config.model.model_copy(update={"dtype": "bfloat16"})
        config = cluster.config.model_copy(update={"model": model})
        async with another_prefill_worker(cluster, config=config):
            await until_standing(cluster, "prefill-1", pb.PAIR_GOOD)
            assert len((await cluster.generate(PROMPT, max_tokens=8, ignore_eos=True)).token_ids) == 8
        await cluster.wait_all_free()


@pytest.mark.parametrize("spoil", [swapped, heads_permuted, shifted_by_a_position, scaled, last_layer_negated])
async def test_a_worker_that_sends_wrong_kv_is_refused_while_a_good_one_beside_it_serves(
    tiny_model: Path, spoil: Spoil, caplog: pytest.LogCaptureFixture
) -> None:
    async with local_cluster(tiny_model) as cluster:
        before = await cluster.generate(PROMPT, max_tokens=8, ignore_eos=True)
        running = asyncio.create_task(cluster.generate(PROMPT, max_tokens=1500, ignore_eos=True))
        async with another_prefill_worker(cluster, faulty(spoil)):
            pair = await until_standing(cluster, "prefill-1", pb.PAIR_REFUSED)
            assert "layer 3 V" in pair.reason if spoil is last_layer_negated else "layer 0 " in pair.reason
            for _ in range(6):
                answer = await cluster.generate(PROMPT, max_tokens=8, ignore_eos=True)
                assert answer.timings.prefill_worker == "prefill-0"
                assert list(answer.token_ids) == list(before.token_ids)
            assert (await cluster.cluster_status()).is_ready
        assert len((await running).token_ids) == 1500
        assert (await checks(cluster, "passed"), await checks(cluster, "disagreed")) == (1, 1)
        await cluster.wait_all_free()
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert errors == [pair.reason]


@pytest.mark.parametrize("fault", ["rope", "weights"])
async def test_a_worker_that_computes_something_else_under_the_same_fingerprint_is_refused(
    tiny_model: Path, tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    if fault == "weights":
        save_tiny_model(other, seed=1)
    else:
        shutil.copytree(tiny_model, other)
        tree = json.loads((other / "config.json").read_text())
        tree["rope_parameters"]["rope_theta"] = 20000.0
        (other / "config.json").write_text(json.dumps(tree))
    honest: list[Engine] = []

    def build_and_pretend(config: EngineConfig) -> Engine:
        engine = build_engine(config)
        engine.layout = honest[0].layout if honest else engine.layout
        honest.append(engine)
        return engine

    monkeypatch.setattr(prefill_worker.server, "build_engine", build_and_pretend)
    async with local_cluster(tiny_model) as cluster:
        model = cluster.config.model.model_copy(update={"source": str(other)})
        config = cluster.config.model_copy(update={"model": model})
        async with another_prefill_worker(cluster, config=config):
            pair = await until_standing(cluster, "prefill-1", pb.PAIR_REFUSED)
        assert ("layer 0 K" if fault == "rope" else "layer 0 ") in pair.reason
        await cluster.wait_all_free()


async def test_when_the_only_pair_is_refused_health_says_why(tiny_model: Path) -> None:
    async with local_cluster(tiny_model, new_sender=faulty(swapped)) as cluster:
        health = await cluster.http.get("/health")
        assert health.status_code == 503
        assert "prefill-0 → decode-0 is refused" in health.json()["error"]["message"]
        assert "layer 0 K has a relative error of 1." in health.json()["error"]["message"]
        refused = await cluster.http.post("/v1/completions", json={"model": "tiny", "prompt": "hi"})
        assert refused.status_code == 503
        await cluster.wait_all_free()


async def test_without_the_self_test_every_pair_that_fits_is_chosen_at_once(tiny_model: Path) -> None:
    sections = {"transfer": {"self_test": False}}
    async with local_cluster(tiny_model, new_sender=faulty(swapped), sections=sections) as cluster:
        assert (await cluster.cluster_status()).is_ready
        assert len((await cluster.generate(PROMPT, max_tokens=4, ignore_eos=True)).token_ids) == 4
        assert (await cluster.prefill_status()).counters["prefills"] == 1


async def test_a_check_that_fails_on_the_way_is_tried_again(tiny_model: Path) -> None:
    async with local_cluster(tiny_model, new_sender=faulty(num_failing=2)) as cluster:
        assert (await cluster.cluster_status()).is_ready
        assert (await checks(cluster, "failed"), await checks(cluster, "passed")) == (2, 1)
        await cluster.wait_all_free()


async def test_a_prefill_worker_that_leaves_during_its_check_frees_the_decode_worker(tiny_model: Path) -> None:
    async with local_cluster(tiny_model) as cluster:
        async with another_prefill_worker(cluster, faulty(num_stuck=1)):
            await wait_until(partial(_has_reserved, cluster), 10, "the check waits for its commit")
            pair = await pair_of(cluster, "prefill-1")
            assert pair is not None
            assert pair.standing == pb.PAIR_UNCHECKED
        await cluster.wait_all_free()
        assert (await cluster.cluster_status()).is_ready


@pytest.mark.slow
async def test_a_decode_worker_that_dies_during_its_check_is_checked_anew_when_it_is_back(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with local_cluster(tiny_model, decode=0, new_sender=faulty(num_stuck=1)) as cluster:
        router = cluster.router.control_address
        start = partial(worker_process, "decode_worker", "decode-0", cluster.config, router, tmp_path)
        async with start() as first:
            await wait_until(partial(_has_prefilled, cluster), 30, "the check waits for its commit")
            assert not (await cluster.cluster_status()).is_ready
            first.send_signal(signal.SIGKILL)
            await first.wait()
            await cluster.wait_all_free(5.0)
        for passed in (1, 2):  # a successor, and that one's
            async with start():
                await until_standing(cluster, "prefill-0", pb.PAIR_GOOD)
                assert await checks(cluster, "passed") == passed
                assert len((await cluster.generate(PROMPT, max_tokens=4, ignore_eos=True)).token_ids) == 4
            await wait_until(partial(_has_no_pair, cluster), 10, "the decode worker is gone")


async def test_the_link_of_each_pair_is_in_the_status(tiny_model: Path) -> None:
    async with local_cluster(tiny_model) as cluster:

        async def heard() -> bool:
            pair = await pair_of(cluster, "prefill-0")
            return pair is not None and pair.link.bytes_per_s > 0 and pair.link.round_trip_s > 0

        await wait_until(heard, 5, "a heartbeat has told the link's speed")
        [sending], [receiving] = (await cluster.prefill_status()).links, (await cluster.decode_status()).links
        hellos = {w.hello.worker_id: w.hello.incarnation for w in (await cluster.cluster_status()).workers}
        assert sending.peer_incarnation == hellos["decode-0"]
        assert receiving.peer_incarnation == hellos["prefill-0"]
        assert sending.transport == receiving.transport
        assert sending.bytes_per_s > 0
        assert receiving.bytes_per_s == 0  # the sending side measures


async def _has_reserved(cluster: LocalCluster) -> bool:
    return (await cluster.decode_status()).load.num_reserved == 1


async def _has_prefilled(cluster: LocalCluster) -> bool:
    """The check's prompt is computed; its KV is not committed."""
    status = await cluster.prefill_status()
    return status.counters["engine_steps"] > 0 and status.load.num_running == 0


async def _has_no_pair(cluster: LocalCluster) -> bool:
    return await pair_of(cluster, "prefill-0") is None
