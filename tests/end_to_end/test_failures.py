"""What dies or lapses, what happens, what the client sees: the table of failures in docs/architecture.md."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import grpc
import pytest
import torch
from openai import InternalServerError, RateLimitError

from common.errors import CorruptPiece, TransferError
from common.identity import Ticket
from common.kv_layout import KVLayout
from common.transfer_config import TransferConfig
from kv_transfer.factory import make_sender
from kv_transfer.transport import (
    Destination,
    KVPiece,
    KVSender,
    LinkReport,
    OutgoingTransfer,
    TransferReceipt,
    TransferStats,
)
from tests.end_to_end.local_cluster import LocalCluster, local_cluster, wait_until
from tests.end_to_end.worker_process import worker_process

PROMPT = [index % 250 for index in range(900)]
UNCHECKED = {"transfer": {"self_test": False}}  # for senders that would not pass
SLOW_PREFILL = {"prefill": {"max_num_batched_tokens": 2}}


async def expected_tokens(model: Path, prompt: list[int], **sampling: object) -> list[int]:
    """The same request without disaggregation and without faults."""
    async with local_cluster(model, prefill=0, decode=0, colocated=1) as cluster:
        return list((await cluster.generate(prompt, **sampling)).token_ids)


@pytest.mark.slow
async def test_a_request_survives_the_death_of_its_prefill_worker(tiny_model: Path, tmp_path: Path) -> None:
    expected = await expected_tokens(tiny_model, PROMPT, max_tokens=20, ignore_eos=True)
    async with local_cluster(tiny_model, prefill=0, sections=SLOW_PREFILL) as cluster:
        start = partial(
            worker_process, "prefill_worker", "prefill-0", cluster.config, cluster.router.control_address, tmp_path
        )
        async with start() as first:
            await wait_until(partial(_is_ready, cluster), 30, "the prefill worker has joined")
            request = asyncio.create_task(cluster.generate(PROMPT, max_tokens=20, ignore_eos=True))
            await wait_until(partial(_prefills, cluster), 10, "the prompt is being computed")
            first.kill()
            async with start():
                answer = await request
        assert list(answer.token_ids) == expected
        assert answer.timings.attempts == 2
        await cluster.wait_all_free()


@pytest.mark.slow
async def test_a_frozen_prefill_worker_is_given_up_and_another_one_finishes(tiny_model: Path, tmp_path: Path) -> None:
    """A process that hangs keeps its connections open; only keepalive tells it from a busy one."""
    expected = await expected_tokens(tiny_model, PROMPT, max_tokens=20, ignore_eos=True)
    async with local_cluster(tiny_model, prefill=0, sections=SLOW_PREFILL) as cluster:
        router = cluster.router.control_address
        async with worker_process("prefill_worker", "prefill-0", cluster.config, router, tmp_path) as frozen:
            await wait_until(partial(_is_ready, cluster), 30, "the prefill worker has joined")
            request = asyncio.create_task(cluster.generate(PROMPT, max_tokens=20, ignore_eos=True))
            await wait_until(partial(_prefills, cluster), 10, "the prompt is being computed")
            frozen.send_signal(signal.SIGSTOP)
            async with worker_process("prefill_worker", "prefill-1", cluster.config, router, tmp_path):
                answer = await request
                workers = [worker.hello.worker_id for worker in (await cluster.cluster_status()).workers]
        assert list(answer.token_ids) == expected
        assert answer.timings.prefill_worker == "prefill-1"
        assert workers == ["decode-0", "prefill-1"]
        await cluster.wait_all_free()


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_the_same_tokens_go_on_when_the_decode_worker_dies_mid_stream(
    tiny_model: Path, tmp_path: Path, temperature: float
) -> None:
    sampling = {"max_tokens": 1500, "ignore_eos": True, "temperature": temperature, "seed": 11}
    prompt = PROMPT[:40]
    expected = await expected_tokens(tiny_model, prompt, **sampling)
    async with local_cluster(tiny_model, decode=0) as cluster:
        start = partial(worker_process, "decode_worker", config=cluster.config, folder=tmp_path)
        async with start(name="decode-0", router_address=cluster.router.control_address) as first:
            await wait_until(partial(_is_ready, cluster), 30, "the decode worker has joined")
            request = asyncio.create_task(cluster.generate(prompt, **sampling))
            await wait_until(partial(_decodes, cluster), 10, "the answer is being decoded")
            first.kill()
            async with start(name="decode-1", router_address=cluster.router.control_address):
                answer = await request
        assert list(answer.token_ids) == expected
        assert answer.usage.completion_tokens == 1500
        assert answer.timings.attempts == 2


class FailingSender:
    """A real sender whose first `num_failures` commits fail as if the destination had refused the KV."""

    def __init__(self, inner: KVSender, num_failures: int, error: TransferError) -> None:
        self._inner = inner
        self.stats: TransferStats = inner.stats
        self.on_room: Callable[[], None] = lambda: None
        self.failures_left = num_failures
        self.error = error

    async def open(self, destination: Destination, ticket: Ticket) -> OutgoingTransfer:
        return FailingTransfer(self, await self._inner.open(destination, ticket))

    def links(self) -> list[LinkReport]:
        return self._inner.links()

    async def close(self) -> None:
        await self._inner.close()


class FailingTransfer:
    def __init__(self, sender: FailingSender, inner: OutgoingTransfer) -> None:
        self._sender = sender
        self._inner = inner

    @property
    def has_room(self) -> bool:
        return self._inner.has_room

    @property
    def piece_bytes(self) -> int:
        return self._inner.piece_bytes

    def send(self, piece: KVPiece) -> None:
        self._inner.send(piece)

    async def commit(self, first_token: int, timeout_s: float) -> TransferReceipt:
        if self._sender.failures_left:
            self._sender.failures_left -= 1
            self._inner.abort()
            raise self._sender.error
        return await self._inner.commit(first_token, timeout_s)

    def abort(self) -> None:
        self._inner.abort()


@pytest.mark.parametrize("num_failures", [1, 2])
async def test_a_corrupt_transfer_is_tried_again_and_no_token_comes_twice(tiny_model: Path, num_failures: int) -> None:
    expected = await expected_tokens(tiny_model, PROMPT, max_tokens=20, ignore_eos=True)
    async with local_cluster(tiny_model, new_sender=failing(num_failures), sections=UNCHECKED) as cluster:
        answer = await cluster.generate(PROMPT, max_tokens=20, ignore_eos=True)
        assert list(answer.token_ids) == expected
        assert answer.timings.attempts == 1 + num_failures
        await cluster.wait_all_free()


async def test_a_transfer_that_never_succeeds_ends_in_a_typed_error(tiny_model: Path) -> None:
    async with local_cluster(tiny_model, new_sender=failing(100), sections=UNCHECKED) as cluster:
        with pytest.raises(InternalServerError) as raised:
            await cluster.openai.completions.create(model="tiny", prompt="hi", max_tokens=5)
        assert raised.value.status_code == 503
        assert raised.value.code == "corrupt_piece"
        await cluster.wait_all_free()


def failing(num_failures: int):  # type: ignore[no-untyped-def]
    def new_sender(config: TransferConfig, layout: KVLayout, incarnation: str, device: torch.device) -> KVSender:
        inner = make_sender(config, layout, incarnation, device)
        return FailingSender(inner, num_failures, CorruptPiece("injected"))

    return new_sender


async def test_without_workers_a_request_is_refused_at_once(tiny_model: Path) -> None:
    async with local_cluster(tiny_model, prefill=0, decode=1) as cluster:
        response = await cluster.http.get("/health")
        assert response.status_code == 503
        assert "no prefill worker" in response.json()["error"]["message"]
        refused = await cluster.http.post("/v1/completions", json={"model": "tiny", "prompt": "hi"})
        assert refused.status_code == 503
        assert refused.headers["retry-after"]


async def test_a_full_queue_refuses_with_429(tiny_model: Path) -> None:
    sections = {"decode": {"max_num_seqs": 1}, "router": {"max_queued_requests": 1}}
    async with local_cluster(tiny_model, sections=sections) as cluster:
        running = asyncio.create_task(cluster.generate(PROMPT[:5], max_tokens=2000, ignore_eos=True))
        await wait_until(partial(_decodes, cluster), 10, "the first request decodes")
        queued = asyncio.create_task(cluster.generate(PROMPT[:5], max_tokens=2, ignore_eos=True))
        await wait_until(partial(_has_queued, cluster), 10, "the second one waits")
        with pytest.raises(RateLimitError) as raised:
            await cluster.openai.completions.create(model="tiny", prompt="hi", max_tokens=5)
        assert raised.value.code == "queue_full"
        assert raised.value.response.headers["retry-after"]
        assert len((await running).token_ids) == 2000
        assert len((await queued).token_ids) == 2


async def test_more_requests_than_the_decode_workers_blocks_hold_all_finish(tiny_model: Path) -> None:
    """Reservations are refused, running sequences are preempted, and every answer is what it would be alone."""
    pool = {"kv_cache_gib": 0.0012}  # about 78 blocks of 16 tokens
    async with local_cluster(tiny_model, pool=pool) as cluster:
        prompts = [[(3 * n + i) % 250 for i in range(150 + n)] for n in range(12)]
        requests = [cluster.generate(prompt, max_tokens=120, ignore_eos=True) for prompt in prompts]
        together = [list(answer.token_ids) for answer in await asyncio.gather(*requests)]
        assert (await cluster.decode_status()).counters["preemptions"] > 0
        await cluster.wait_all_free()
        alone = [list((await cluster.generate(p, max_tokens=120, ignore_eos=True)).token_ids) for p in prompts]
    assert together == alone


async def test_a_router_that_stops_ends_every_request_with_a_typed_error(tiny_model: Path) -> None:
    async with local_cluster(tiny_model) as cluster:
        endless = {"model": "tiny", "prompt": "hi", "max_tokens": 4000, "ignore_eos": True}
        whole = asyncio.create_task(cluster.http.post("/v1/completions", json=endless))
        stream = asyncio.create_task(cluster.http.post("/v1/completions", json=endless | {"stream": True}))
        rpc = asyncio.create_task(cluster.generate(PROMPT[:5], max_tokens=4000, ignore_eos=True))

        async def all_decode() -> bool:
            return (await cluster.decode_status()).load.num_running == 3

        await wait_until(all_decode, 10, "all three decode")
        await cluster.router.stop()
        assert (await whole).status_code == 503
        assert (await whole).json()["error"]["code"] == "worker_draining"
        last_event = (await stream).text.strip().splitlines()[-1]
        assert json.loads(last_event.removeprefix("data: "))["error"]["code"] == "worker_draining"
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await rpc
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        await cluster.wait_all_free()


async def _is_ready(cluster: LocalCluster) -> bool:
    return (await cluster.cluster_status()).is_ready


async def _prefills(cluster: LocalCluster) -> bool:
    workers = (await cluster.cluster_status()).workers
    return any(worker.load.uncached_tokens > 0 and worker.load.num_running for worker in workers)


async def _decodes(cluster: LocalCluster) -> bool:
    workers = (await cluster.cluster_status()).workers
    return any(worker.load.num_running and worker.load.uncached_tokens == 0 for worker in workers)


async def _has_queued(cluster: LocalCluster) -> bool:
    return (await cluster.cluster_status()).num_queued > 0
