"""The whole system in one process: a real router and real workers on loopback ports, torn down whatever happens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI

from common.config import Role, ServeConfig
from common.pb import serving_pb2 as pb
from common.pb import serving_pb2_grpc as pb_grpc
from common.rpc import new_channel
from decode_worker.server import DecodeServer
from kv_transfer.factory import make_sender
from prefill_worker.server import PrefillServer, SenderFactory
from router.server import RouterServer

READY_S = 30.0


@dataclass
class LocalCluster:
    config: ServeConfig
    routers: list[RouterServer]
    prefill: list[PrefillServer]
    decode: list[DecodeServer]
    http: httpx.AsyncClient
    openai: AsyncOpenAI

    @property
    def router(self) -> RouterServer:
        """The first, which `http` and `openai` call."""
        return self.routers[0]

    async def decode_status(self, index: int = 0) -> pb.WorkerStatus:
        async with new_channel(self.decode[index].address) as channel:
            return await pb_grpc.DecodeStub(channel).GetStatus(pb.WorkerStatusRequest(), timeout=10)

    async def prefill_status(self, index: int = 0) -> pb.WorkerStatus:
        async with new_channel(self.prefill[index].address) as channel:
            return await pb_grpc.PrefillStub(channel).GetStatus(pb.WorkerStatusRequest(), timeout=10)

    async def statuses(self) -> list[pb.WorkerStatus]:
        prefill = [await self.prefill_status(index) for index in range(len(self.prefill))]
        return prefill + [await self.decode_status(index) for index in range(len(self.decode))]

    async def cluster_status(self, router: int = 0) -> pb.ClusterStatus:
        async with new_channel(self.routers[router].control_address) as channel:
            return await pb_grpc.RegistryStub(channel).GetClusterStatus(pb.ClusterStatusRequest(), timeout=10)

    async def wait_all_free(self, timeout_s: float = 1.0) -> None:
        """Fails unless every KV block of every worker is free within `timeout_s`."""
        await wait_until(self._are_all_free, timeout_s, "every KV block is free")

    async def complete(self, prompt: str | list[int], **options: Any) -> dict[str, Any]:
        body = {"model": "tiny", "prompt": prompt, "temperature": 0, **options}
        response = await self.http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def drain(self, worker_id: str, timeout_s: float = 0.0, router: int = 0) -> None:
        async with new_channel(self.routers[router].control_address) as channel:
            request = pb.DrainWorkerRequest(worker_id=worker_id, timeout_s=timeout_s)
            await pb_grpc.RegistryStub(channel).DrainWorker(request, timeout=10)

    async def generate(self, prompt: list[int], *, router: int = 0, **sampling: Any) -> pb.GenerateResponse:
        """Over gRPC: one message with every token id, the finish reason, usage and timings. Greedy by default."""
        request = pb.GenerateRequest(
            prompt_token_ids=pb.TokenIds(ids=prompt), sampling=pb.SamplingParams(**{"temperature": 0, **sampling})
        )
        whole = pb.GenerateResponse()
        async with new_channel(self.routers[router].grpc_address) as channel:
            async for delta in pb_grpc.InferenceStub(channel).Generate(request, timeout=120):
                whole.MergeFrom(delta)
        return whole

    async def _are_all_free(self) -> bool:
        loads = [status.load for status in await self.statuses()]
        return all(
            load.free_blocks == load.total_blocks and not (load.num_waiting or load.num_running or load.num_reserved)
            for load in loads
        )


@asynccontextmanager
async def local_cluster(
    model: Path | str,
    *,
    prefill: int = 1,
    decode: int = 1,
    colocated: int = 0,
    routers: int = 1,
    new_sender: SenderFactory = make_sender,
    sections: Mapping[str, Mapping[str, Any]] | None = None,
    pool: Mapping[str, Any] | None = None,
) -> AsyncIterator[LocalCluster]:
    """`sections` are merged over a small float32 configuration, e.g. {"transfer": {"transport": "torch_dist"}}, and
    `pool` over every pool's."""
    config = _config(model, pool or {}, sections or {})
    async with AsyncExitStack() as stack:
        started: list[RouterServer] = []
        for _ in range(routers):
            started.append(await RouterServer.start(config))
            stack.push_async_callback(started[-1].stop)
        addresses = [router.control_address for router in started]
        prefills, decodes = [], []
        for index in range(prefill):
            name = f"prefill-{index}"
            prefills.append(await PrefillServer.start(config, name, addresses, new_sender))
            stack.push_async_callback(prefills[-1].stop)
        roles = [Role.DECODE] * decode + [Role.COLOCATED] * colocated
        for index, role in enumerate(roles):
            decodes.append(await DecodeServer.start(config, f"{role}-{index}", addresses, role))
            stack.push_async_callback(decodes[-1].stop)
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=started[0].http_url, timeout=120))
        openai = AsyncOpenAI(base_url=f"{started[0].http_url}/v1", api_key="none", max_retries=0, timeout=120)
        stack.push_async_callback(openai.close)
        cluster = LocalCluster(config, started, prefills, decodes, http, openai)
        num_workers = prefill + decode + colocated

        async def all_settled() -> bool:
            statuses = [await cluster.cluster_status(router) for router in range(routers)]
            are_checked = all(pair.standing != pb.PAIR_UNCHECKED for status in statuses for pair in status.pairs)
            return all(len(status.workers) == num_workers for status in statuses) and are_checked

        await wait_until(all_settled, READY_S, "every worker has joined and every pair is checked")
        yield cluster


async def wait_until(condition: Callable[[], Any], timeout_s: float, what: str) -> None:
    """Poll an async condition; fail by name when it does not come true in time."""
    deadline = time.monotonic() + timeout_s
    while not await condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(0.02)


def _config(model: Path | str, pool: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any]]) -> ServeConfig:
    pool = {"num_threads": 1, "kv_cache_gib": 0.02, "block_size": 16, **pool}
    tree: dict[str, dict[str, Any]] = {
        "model": {"source": str(model), "name": "tiny", "dtype": "float32"},
        "router": {"http_port": 0, "grpc_port": 0, "control_port": 0},
        "prefill": dict(pool),
        "decode": dict(pool),
        "colocated": dict(pool),
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    return ServeConfig.model_validate(tree)
