"""Who is checked when, and what becomes of it. The workers are real gRPC servers that answer by script."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from common.errors import CorruptPiece, IncompatiblePeer, NoFreeBlocks, ServingError
from common.kv_layout import KVLayout
from common.pb import kv_transfer_pb2 as kv_pb
from common.pb import serving_pb2 as pb
from common.pb import serving_pb2_grpc as pb_grpc
from common.rpc import answering, bind_port, new_server
from router.pair_checker import FIRST_PAUSE_S, MAX_CONCURRENT_CHECKS, NUM_PROMPT_TOKENS, PairChecker, probe_prompt
from router.pairs import MAX_TRANSFER_FAULTS, Pair, Standing
from router.prefix_index import PrefixIndex
from router.registry import Registry
from router.worker import Worker

ROLES = {"prefill": pb.ROLE_PREFILL, "decode": pb.ROLE_DECODE, "colocated": pb.ROLE_COLOCATED}
EQUAL = pb.PairVerdict(is_equal=True, detail="close")
DIFFERENT = pb.PairVerdict(is_equal=False, detail="layer 0 K")


class ScriptedWorkers(pb_grpc.PrefillServicer, pb_grpc.DecodeServicer):
    """All workers behind one address. A check takes until `gate` is open; `errors` meet the prefill side first."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.verdict = EQUAL
        self.errors: list[ServingError] = []
        self.requests: list[pb.PrefillRequest] = []
        self.under_way: list[set[str]] = []
        self.most_under_way = 0

    async def CheckPair(
        self, request: pb.PairCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.PairCheckEvent]:
        async with answering(context):
            yield pb.PairCheckEvent(reserved=pb.Reserved(destination=kv_pb.Destination(incarnation="d")))
            yield pb.PairCheckEvent(verdict=self.verdict)

    async def Run(
        self, request: pb.PrefillRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.PrefillEvent]:
        workers = set(request.request_id.removeprefix("check ").split(" → "))
        assert len(workers) == 2
        assert not any(workers & others for others in self.under_way), "a worker is in two checks at once"
        async with answering(context):
            self.requests.append(request)
            self.under_way.append(workers)
            self.most_under_way = max(self.most_under_way, len(self.under_way))
            try:
                await self.gate.wait()
            finally:
                self.under_way.remove(workers)
            if self.errors:
                raise self.errors.pop(0)
            yield pb.PrefillEvent(done=pb.PrefillDone())


class Cluster:
    def __init__(self, address: str, workers: ScriptedWorkers) -> None:
        self.workers = workers
        self.results: list[str] = []
        self.registry = Registry("tiny", PrefixIndex(1000), must_check_pairs=True)
        self.checker = PairChecker(self.registry, self.results.append)
        self.changes = 0
        self.registry.on_change = self._changed
        self._address = address

    def _changed(self) -> None:
        self.changes += 1

    def join(self, name: str, *, dtype: str = "float32", max_model_len: int = 100, capacity: int = 1000) -> Worker:
        worker = Worker(
            pb.WorkerHello(
                worker_id=name,
                role=ROLES[name.partition("-")[0]],
                incarnation=f"incarnation of {name}",
                model="tiny",
                layout=KVLayout("f00d", 4, 2, 8, dtype, "theta=10000").to_pb(),
                address=self._address,
                vocab_size=258,
                max_model_len=max_model_len,
                kv_capacity_tokens=capacity,
            )
        )
        self.registry.join(worker)
        return worker

    def pair(self, prefill: str = "prefill-0", decode: str = "decode-0") -> Pair:
        return next(pair for pair in self.registry.pairs if str(pair) == f"{prefill} → {decode}")

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.005)


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    workers = ScriptedWorkers()
    server = new_server()
    pb_grpc.add_PrefillServicer_to_server(workers, server)
    pb_grpc.add_DecodeServicer_to_server(workers, server)
    address = bind_port(server, "127.0.0.1", 0)
    await server.start()
    made = Cluster(address, workers)
    yield made
    await made.checker.close()
    members = made.registry.workers
    for worker in members:
        made.registry.leave(worker)
        await worker.close_when_idle()
    await server.stop(None)
    assert made.registry.pairs == []


async def test_a_pair_is_chosen_once_its_check_has_passed(cluster: Cluster) -> None:
    prefill, decode = cluster.join("prefill-0"), cluster.join("decode-0")
    await cluster.until(lambda: cluster.workers.under_way)
    assert not cluster.registry.can_send(prefill, decode)
    assert cluster.registry.not_ready_reason() == "prefill-0 → decode-0 has not passed its check yet"
    before = cluster.changes
    cluster.workers.gate.set()
    await cluster.until(lambda: cluster.registry.can_send(prefill, decode))
    assert cluster.registry.not_ready_reason() is None
    assert cluster.results == ["passed"]
    assert cluster.changes == before + 1  # queued requests are placed now


async def test_a_pair_that_disagrees_is_never_checked_again_until_one_of_them_is_another(cluster: Cluster) -> None:
    cluster.workers.gate.set()
    cluster.workers.verdict = DIFFERENT
    cluster.join("prefill-0")
    decode = cluster.join("decode-0")
    await cluster.until(lambda: cluster.pair().standing is Standing.REFUSED)
    assert "layer 0 K" in str(cluster.registry.not_ready_reason())
    await cluster.until(lambda: not cluster.checker.num_unsettled)
    cluster.registry.leave(decode)
    await decode.close_when_idle()
    cluster.workers.verdict = EQUAL
    cluster.join("decode-0")
    await cluster.until(lambda: cluster.pair().is_good)
    assert cluster.results == ["disagreed", "passed"]


async def test_workers_that_can_never_exchange_kv_are_refused_at_the_first_try(cluster: Cluster) -> None:
    cluster.workers.gate.set()
    cluster.workers.errors = [IncompatiblePeer("another secret")]
    cluster.join("prefill-0")
    cluster.join("decode-0")
    await cluster.until(lambda: cluster.pair().standing is Standing.REFUSED)
    assert "another secret" in cluster.pair().reason
    assert cluster.results == ["incompatible"]


async def test_a_failed_check_says_why_and_is_tried_again(cluster: Cluster) -> None:
    cluster.workers.gate.set()
    cluster.workers.errors = [ServingError("injected")]
    cluster.join("prefill-0")
    cluster.join("decode-0")
    await cluster.until(lambda: cluster.results)
    assert "injected" in str(cluster.registry.not_ready_reason())
    await cluster.until(lambda: cluster.pair().is_good)
    assert cluster.results == ["failed", "passed"]


async def test_a_worker_that_is_only_busy_is_tried_again_soon_and_does_not_lengthen_the_pause_after_failures(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    def skip_pause(checker: PairChecker, pair: Pair, pause_s: float, next_pause_s: float) -> None:
        pauses.append(pause_s)
        checker._enqueue(pair, next_pause_s)

    monkeypatch.setattr(PairChecker, "_pause", skip_pause)
    cluster.workers.gate.set()
    failed, busy = ServingError("injected"), NoFreeBlocks("full")
    cluster.workers.errors = [failed, busy, busy, busy, failed, busy]
    cluster.join("prefill-0")
    cluster.join("decode-0")
    await cluster.until(lambda: cluster.pair().is_good)
    assert cluster.results == ["failed", "busy", "busy", "busy", "failed", "busy", "passed"]
    assert pauses == [FIRST_PAUSE_S, FIRST_PAUSE_S, FIRST_PAUSE_S, FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, FIRST_PAUSE_S]


async def test_each_worker_is_in_one_check_at_a_time_and_few_run_at_once(cluster: Cluster) -> None:
    for index in range(6):
        cluster.join(f"prefill-{index}")
        cluster.join(f"decode-{index}")
    await cluster.until(lambda: len(cluster.workers.under_way) == MAX_CONCURRENT_CHECKS)
    cluster.workers.gate.set()
    await cluster.until(lambda: all(pair.is_good for pair in cluster.registry.pairs))
    assert cluster.workers.most_under_way == MAX_CONCURRENT_CHECKS
    assert cluster.results == ["passed"] * 36
    assert len({request.ticket.transfer_id for request in cluster.workers.requests}) == 36
    assert len({request.cache_salt for request in cluster.workers.requests}) == 36


async def test_only_pairs_of_both_roles_that_fit_are_checked(cluster: Cluster) -> None:
    cluster.workers.gate.set()
    cluster.join("prefill-0", dtype="bfloat16")
    cluster.join("colocated-0")
    cluster.join("decode-0")
    cluster.join("decode-1", dtype="bfloat16")
    await cluster.until(lambda: not cluster.checker.num_unsettled)
    assert cluster.results == ["passed"]
    assert cluster.pair(decode="decode-1").is_good
    assert "dtype" in cluster.pair(decode="decode-0").reason
    assert len(cluster.registry.pairs) == 2


async def test_a_worker_that_leaves_during_its_check_ends_the_check(cluster: Cluster) -> None:
    cluster.join("prefill-0")
    leaving = cluster.join("decode-0")
    await cluster.until(lambda: cluster.workers.under_way)
    cluster.registry.leave(leaving)
    await cluster.until(lambda: not cluster.workers.under_way and not cluster.checker.num_unsettled)
    await leaving.close_when_idle()
    assert cluster.results == []


@pytest.mark.parametrize(("max_model_len", "num_tokens"), [(2, 0), (3, 1), (38, 36), (39, 37), (5000, 37)])
async def test_the_test_prompt_fits_the_shorter_context(cluster: Cluster, max_model_len: int, num_tokens: int) -> None:
    cluster.workers.gate.set()
    cluster.join("prefill-0", max_model_len=max_model_len)
    cluster.join("decode-0", max_model_len=8000)
    prompt = probe_prompt(cluster.pair())
    assert len(prompt) == num_tokens <= NUM_PROMPT_TOKENS
    assert all(0 <= token < 258 for token in prompt)
    await cluster.until(lambda: cluster.pair().is_good)
    assert [len(request.token_ids) for request in cluster.workers.requests] == [num_tokens] * (num_tokens > 0)


@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("num_blocks", [2, 3, 4, 5, 6, 7, 8, 100])
async def test_the_test_prompt_fits_twice_into_the_decode_workers_memory(
    cluster: Cluster, num_blocks: int, block_size: int
) -> None:
    cluster.workers.gate.set()
    cluster.join("prefill-0")
    cluster.join("decode-0", capacity=num_blocks * block_size)
    needed = len(probe_prompt(cluster.pair())) + 1
    assert needed > 1
    assert 2 * math.ceil(needed / block_size) <= num_blocks
    await cluster.until(lambda: cluster.pair().is_good)


async def test_a_pair_that_is_doubted_is_checked_again_and_chosen_again(cluster: Cluster) -> None:
    cluster.workers.gate.set()
    prefill, decode = cluster.join("prefill-0"), cluster.join("decode-0")
    await cluster.until(lambda: cluster.pair().is_good)
    cluster.workers.errors = [ServingError("still broken")]
    for _ in range(MAX_TRANSFER_FAULTS):
        cluster.registry.transfer_ended("prefill-0", "decode-0", CorruptPiece("bits"))
    assert not cluster.registry.can_send(prefill, decode)
    assert "bits" in str(cluster.registry.not_ready_reason())
    await cluster.until(lambda: cluster.pair().is_good)
    assert cluster.results == ["passed", "failed", "passed"]
