"""The workers that are alive, and which of them fit together. A worker's membership is its open stream."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing
from typing import Any

import grpc

from common.cluster_access import ClusterAccess
from common.config import Role
from common.errors import IncompatiblePeer, InvalidRequest, TransferError
from common.identity import new_incarnation
from common.pb import serving_pb2 as pb
from common.pb import serving_pb2_grpc as pb_grpc
from common.rpc import answering
from router.pairs import Pair, Standing, new_pair
from router.prefix_index import PrefixIndex
from router.prompt_hashes import PromptHashes
from router.readiness import Readiness
from router.supervision import Supervision
from router.worker import Worker

logger = logging.getLogger(__name__)

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")  # of a worker: it goes to terminals, logs and metrics


class Registry:
    """Worker ids to live workers, every pair that two of them make, and what their prefix caches hold.

    Calls `on_change` when a worker joins, leaves or reports a new load, and when a pair turns out good or bad; before
    that `on_left`, and `on_new_pair` and `on_lost_pair` for each pair that comes or goes with it. `on_doubted_pair`: a
    good pair is unchecked again.
    """

    def __init__(
        self, model: str, index: PrefixIndex, *, must_check_pairs: bool, lone_decode_s: float | None = None
    ) -> None:
        """must_check_pairs: somebody will check each new pair; until then it is not chosen.
        lone_decode_s: how long a decode worker must have been a member before it computes prompts; None: it never does.
        """
        self._model = model
        self._index = index
        self._must_check_pairs = must_check_pairs
        self._lone_decode_s = lone_decode_s
        self._workers: dict[str, Worker] = {}
        self._pairs: dict[tuple[Worker, Worker], Pair] = {}
        self._readiness = Readiness(self.not_ready_reason)
        self.on_change: Callable[[], None] = lambda: None
        self.on_left: Callable[[Worker], None] = lambda worker: None
        self.on_new_pair: Callable[[Pair], None] = lambda pair: None
        self.on_lost_pair: Callable[[Pair], None] = lambda pair: None
        self.on_doubted_pair: Callable[[Pair], None] = lambda pair: None

    @property
    def workers(self) -> list[Worker]:
        return list(self._workers.values())

    @property
    def pairs(self) -> list[Pair]:
        return list(self._pairs.values())

    def with_role(self, role: Role) -> list[Worker]:
        """Those that may be given work now."""
        return [worker for worker in self._workers.values() if worker.role is role and worker.is_fit]

    def is_member(self, worker: Worker) -> bool:
        return self._workers.get(worker.worker_id) is worker

    def can_send(self, prefill: Worker, decode: Worker) -> bool:
        pair = self._pairs.get((prefill, decode))
        return pair is not None and pair.is_good

    def may_compute(self, decode: Worker) -> bool:
        """Whether this decode worker may be asked to compute prompts. One that has just come usually waits for the
        prefill workers that are about to come, and to be checked."""
        return self._lone_decode_s is not None and time.monotonic() - decode.joined_s >= self._lone_decode_s

    def cached_tokens(self, prompt: PromptHashes, workers: Iterable[Worker]) -> dict[Worker, int]:
        """How many of a prompt's tokens each worker holds, from the first on, as of its last heartbeat."""
        block_sizes = {worker: worker.hello.block_size for worker in workers}
        held = {
            block_size: self._index.leading_blocks(prompt.of(block_size)) if block_size else {}
            for block_size in set(block_sizes.values())
        }
        return {
            worker: held[block_size].get(worker.worker_id, 0) * block_size for worker, block_size in block_sizes.items()
        }

    def num_cached_blocks(self, worker: Worker) -> int:
        return self._index.num_held(worker.worker_id)

    def not_ready_reason(self) -> str | None:
        """Why no request can be served now, or None if one can."""
        if self.with_role(Role.COLOCATED):
            return None
        if any(self.may_compute(decode) for decode in self.with_role(Role.DECODE)):
            return None
        prefillers, decoders = self.with_role(Role.PREFILL), self.with_role(Role.DECODE)
        missing = [role for role, alive in (("prefill", prefillers), ("decode", decoders)) if not alive]
        if missing:
            return f"no {' and no '.join(missing)} worker is alive{self._unfit(missing)}"
        if any(self.can_send(prefill, decode) for prefill in prefillers for decode in decoders):
            return None
        return _obstacle([self._pairs[prefill, decode] for prefill in prefillers for decode in decoders])

    def _unfit(self, roles: list[str]) -> str:
        """Those who are there all the same, and what is wrong with them."""
        unfit = [f"{worker.worker_id}: {worker.unfit_reason}" for worker in self.workers if worker.role in roles]
        return f" ({'; '.join(unfit)})" if unfit else ""

    def drain(self, worker_id: str, timeout_s: float) -> None:
        """It is given nothing more from here, and is told to leave. Raises: InvalidRequest if it is no member."""
        worker = self._workers.get(worker_id)
        if worker is None:
            there = ", ".join(sorted(self._workers)) or "none at all"
            raise InvalidRequest(f"no worker here is called {worker_id}; there are: {there}", param="worker_id")
        worker.is_draining = True
        worker.drain_order = pb.DrainOrder(timeout_s=timeout_s)
        self.on_change()

    def unready_s(self) -> float:
        """For how long no request could be served; 0 if one can."""
        return self._readiness.unready_s()

    async def until_ready(self) -> None:
        """Wait a moment for workers that are about to come (back); see readiness.py."""
        await self._readiness.wait()

    def max_model_len(self) -> int | None:
        """Tokens that every live worker can hold, prompt and answer together; None before the first worker."""
        return min((worker.hello.max_model_len for worker in self._workers.values()), default=None)

    def vocab_size(self) -> int | None:
        return min((worker.hello.vocab_size for worker in self._workers.values()), default=None)

    def join(self, worker: Worker) -> None:
        """Admit a worker.

        Raises: IncompatiblePeer if it serves another model, or if another worker lives under its name. One that died
        is gone as soon as its stream breaks; its successor tries again until then.
        """
        hello = worker.hello
        if hello.model != self._model:
            raise IncompatiblePeer(f"this router serves {self._model!r}, {hello.worker_id} serves {hello.model!r}")
        other = self._workers.get(worker.worker_id)
        if other is not None:
            raise IncompatiblePeer(
                f"a worker at {other.hello.address} is registered as {worker.worker_id}; give this one another --name"
            )
        self._workers[worker.worker_id] = worker
        self._index.join(worker.worker_id)
        logger.info("%s joined: %s at %s", worker.worker_id, hello.incarnation, hello.address)
        for pair in self._pairs_with(worker):
            self._pairs[pair.prefill, pair.decode] = pair
            self.on_new_pair(pair)
        self.on_change()

    def heard(self, worker: Worker, load: pb.WorkerLoad) -> None:
        """A member's heartbeat; its first one tells of all that its prefix cache holds."""
        if self.is_member(worker):
            self._index.update(worker.worker_id, load.stored_blocks, load.evicted_blocks)
        worker.heard(load)
        self._readiness.note()
        self.on_change()

    def transfer_ended(self, prefill_id: str, decode_id: str, error: TransferError | None) -> None:
        """How a request's KV fared between two workers. Of a pair that fails again and again the check decides."""
        prefill, decode = self._workers.get(prefill_id), self._workers.get(decode_id)
        pair = self._pairs.get((prefill, decode)) if prefill and decode else None
        if pair is None:
            return
        if error is None:
            pair.num_faults = 0
        elif pair.transfer_failed(error):
            logger.warning("%s", pair.reason)
            self.on_doubted_pair(pair)

    def leave(self, worker: Worker) -> None:
        if self.is_member(worker):
            self._readiness.note()
            del self._workers[worker.worker_id]
            self.on_left(worker)
            self._index.leave(worker.worker_id)
            logger.info("%s left: %s", worker.worker_id, worker.hello.incarnation)
            for pair in [pair for pair in self._pairs.values() if worker in (pair.prefill, pair.decode)]:
                del self._pairs[pair.prefill, pair.decode]
                self.on_lost_pair(pair)
            self.on_change()

    def _pairs_with(self, worker: Worker) -> list[Pair]:
        match worker.role:
            case Role.PREFILL:
                both = [(worker, other) for other in self._workers.values() if other.role is Role.DECODE]
            case Role.DECODE:
                both = [(other, worker) for other in self._workers.values() if other.role is Role.PREFILL]
            case Role.COLOCATED:
                both = []
        return [new_pair(prefill, decode, must_check=self._must_check_pairs) for prefill, decode in both]


def _obstacle(pairs: list[Pair]) -> str:
    """Why none of these pairs can be chosen. Those that may yet turn out good speak first."""
    unchecked = [pair for pair in pairs if pair.standing is Standing.UNCHECKED]
    return (unchecked or pairs)[0].reason


class RegistryService(pb_grpc.RegistryServicer):
    """Register: membership lasts exactly as long as the stream. Supervise: for `pdserve up`. The rest: for people."""

    def __init__(
        self,
        registry: Registry,
        status: Callable[[], pb.ClusterStatus],
        supervision: Supervision,
        access: ClusterAccess,
    ) -> None:
        self._registry = registry
        self._status = status
        self._supervision = supervision
        self._access = access
        self._incarnation = new_incarnation()

    async def Register(
        self, requests: AsyncIterator[pb.WorkerReport], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.RegisterReply]:
        async with answering(context):
            first = await anext(requests, None)
            if first is None or not first.hello.worker_id or not first.hello.incarnation or not first.hello.role:
                raise InvalidRequest("a worker's first report is a hello with its id, role and incarnation")
            if not NAME.fullmatch(first.hello.worker_id):
                raise InvalidRequest("a worker's name has 1 to 64 letters, digits, dots, dashes and underscores")
            worker = Worker(first.hello, self._access)
            try:
                self._registry.join(worker)
                yield pb.RegisterReply(router_incarnation=self._incarnation)
                async for report in requests:
                    self._registry.heard(worker, report.load)
                    if worker.drain_order is not None:
                        order, worker.drain_order = worker.drain_order, None
                        yield pb.RegisterReply(drain=order)
            finally:
                self._registry.leave(worker)
                await worker.close_when_idle()

    async def GetClusterStatus(
        self, request: pb.ClusterStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ClusterStatus:
        return self._status()

    async def DrainWorker(
        self, request: pb.DrainWorkerRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.DrainWorkerReply:
        async with answering(context):
            self._registry.drain(request.worker_id, request.timeout_s)
        return pb.DrainWorkerReply()

    async def Supervise(
        self, requests: AsyncIterator[pb.SupervisorReport], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.ScaleOrder]:
        async with aclosing(self._supervision.supervise(requests)) as orders:
            async for order in orders:
                yield order

    async def ScalePool(
        self, request: pb.ScalePoolRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ScalePoolReply:
        async with answering(context):
            await self._supervision.scale(request)
        return pb.ScalePoolReply()
