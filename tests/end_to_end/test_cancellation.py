"""A client that leaves, in any phase, leaves every block free on both workers within a second (LESSONS 3, 4)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

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

Client = Callable[[LocalCluster, list[int]], Awaitable[Any]]

SHORT = list(b"a short prompt")
UNCHECKED = {"transfer": {"self_test": False}}  # for senders that would not pass
LONG = [index % 250 for index in range(3000)]


class StuckSender:
    """A real sender whose commits wait until they are cancelled: transfers that never end by themselves."""

    def __init__(self, inner: KVSender) -> None:
        self._inner = inner
        self.stats: TransferStats = inner.stats
        self.on_room: Callable[[], None] = lambda: None

    async def open(self, destination: Destination, ticket: Ticket) -> OutgoingTransfer:
        return StuckTransfer(await self._inner.open(destination, ticket))

    def links(self) -> list[LinkReport]:
        return self._inner.links()

    async def close(self) -> None:
        await self._inner.close()


class StuckTransfer:
    def __init__(self, inner: OutgoingTransfer) -> None:
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
        await asyncio.get_running_loop().create_future()
        raise AssertionError("unreachable")

    def abort(self) -> None:
        self._inner.abort()


def stuck_sender(config: TransferConfig, layout: KVLayout, incarnation: str, device: torch.device) -> KVSender:
    return StuckSender(make_sender(config, layout, incarnation, device))


async def http_stream(cluster: LocalCluster, prompt: list[int]) -> None:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 900, "ignore_eos": True, "stream": True}
    async with cluster.http.stream("POST", "/v1/completions", json=body) as response:
        async for _ in response.aiter_lines():
            pass


async def http_whole(cluster: LocalCluster, prompt: list[int]) -> None:
    await cluster.complete(prompt, max_tokens=900, ignore_eos=True)


async def grpc_stream(cluster: LocalCluster, prompt: list[int]) -> None:
    await cluster.generate(prompt, max_tokens=900, ignore_eos=True)


@pytest.fixture(params=[http_stream, http_whole, grpc_stream])
def client(request: pytest.FixtureRequest) -> Client:
    chosen: Client = request.param
    return chosen


@asynccontextmanager
async def leaving(request: Awaitable[Any]) -> AsyncIterator[None]:
    """Send a request; at the end of the block the client goes away."""
    task = asyncio.ensure_future(request)
    try:
        yield
    finally:
        assert not task.done(), "the request ended before its client left"
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_a_client_that_leaves_the_queue_gives_its_place_back(tiny_model: Path, client: Client) -> None:
    async with local_cluster(tiny_model, sections={"decode": {"max_num_seqs": 1}}) as cluster:
        async with leaving(client(cluster, SHORT)):
            await wait_until(partial(_decodes, cluster), 10, "the first request decodes")
            async with leaving(client(cluster, SHORT)):
                await wait_until(partial(_has_queued, cluster, 1), 10, "the second request is queued")
            await wait_until(partial(_has_queued, cluster, 0), 1, "the queue is empty")
        await cluster.wait_all_free(1.0)


async def test_a_client_that_leaves_during_prefill_frees_both_workers(tiny_model: Path, client: Client) -> None:
    async with local_cluster(tiny_model, sections={"prefill": {"max_num_batched_tokens": 4}}) as cluster:
        async with leaving(client(cluster, LONG)):
            await wait_until(partial(_prefills, cluster), 10, "the prompt is being computed")
            assert (await cluster.decode_status()).load.num_reserved == 1
        await cluster.wait_all_free(1.0)


async def test_a_client_that_leaves_during_the_transfer_frees_both_workers(tiny_model: Path, client: Client) -> None:
    async with local_cluster(tiny_model, new_sender=stuck_sender, sections=UNCHECKED) as cluster:
        async with leaving(client(cluster, SHORT)):
            await wait_until(partial(_has_prefilled, cluster), 10, "the prompt is computed")
            assert (await cluster.decode_status()).load.num_reserved == 1
        await cluster.wait_all_free(1.0)


async def test_a_client_that_leaves_during_decode_frees_both_workers(tiny_model: Path, client: Client) -> None:
    async with local_cluster(tiny_model) as cluster:
        async with leaving(client(cluster, SHORT)):
            await wait_until(partial(_decodes, cluster), 10, "the answer is being decoded")
        await cluster.wait_all_free(1.0)


async def test_a_deadline_frees_both_workers_and_says_so(tiny_model: Path) -> None:
    async with local_cluster(tiny_model, new_sender=stuck_sender, sections=UNCHECKED) as cluster:
        body = {"model": "tiny", "prompt": SHORT, "max_tokens": 900}
        response = await cluster.http.post("/v1/completions", json=body, headers={"X-Request-Deadline-Ms": "300"})
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "deadline_exceeded"
        await cluster.wait_all_free(1.0)


async def _has_queued(cluster: LocalCluster, number: int) -> bool:
    return (await cluster.cluster_status()).num_queued == number


async def _prefills(cluster: LocalCluster) -> bool:
    return (await cluster.prefill_status()).load.num_running == 1


async def _has_prefilled(cluster: LocalCluster) -> bool:
    """The first token is sampled; the reservation still waits for the commit."""
    status = await cluster.prefill_status()
    return status.counters["engine_steps"] > 0 and status.load.num_running == 0


async def _decodes(cluster: LocalCluster) -> bool:
    return (await cluster.decode_status()).load.num_running == 1
