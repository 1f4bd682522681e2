"""The workers that are alive, and what this router has sent to each. A worker's membership is its open stream."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from common.config import Role
from common.errors import IncompatiblePeer, InvalidRequest, LayoutMismatch, WorkerUnavailable
from common.identity import new_incarnation
from common.kv_layout import KVLayout
from common.pb import serving_pb2 as pb
from common.pb import serving_pb2_grpc as pb_grpc
from common.rpc import answering, new_channel, typed_errors
from router.policy import WorkerSnapshot

logger = logging.getLogger(__name__)

ROLES = {pb.ROLE_PREFILL: Role.PREFILL, pb.ROLE_DECODE: Role.DECODE, pb.ROLE_COLOCATED: Role.COLOCATED}

# A worker whose engine hangs keeps its connections; this is far longer than any step.
HEARTBEAT_LOST_S = 30.0


class Worker:
    """One incarnation of one worker: its hello, its last heartbeat, its channel, and this router's requests on it."""

    def __init__(self, hello: pb.WorkerHello) -> None:
        self.hello = hello
        self.worker_id = hello.worker_id
        self.role = ROLES[hello.role]
        self.load = pb.WorkerLoad()
        self.cached_blocks: set[bytes] = set()  # hashes in the worker's prefix cache, as of its last heartbeat
        self.heartbeat_s = time.monotonic()
        self.is_suspect = False  # a call to it failed, and it has not been heard of since
        self.num_assigned = 0
        self.assigned_tokens = 0
        self._channel = new_channel(hello.address)
        self.prefill = pb_grpc.PrefillStub(self._channel)
        self.decode = pb_grpc.DecodeStub(self._channel)
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @contextmanager
    def assigned(self, num_tokens: int) -> Iterator[None]:
        """Count a request from its selection to its end."""
        self.num_assigned += 1
        self.assigned_tokens += num_tokens
        self._is_idle.clear()
        try:
            yield
        finally:
            self.num_assigned -= 1
            self.assigned_tokens -= num_tokens
            if self.num_assigned == 0:
                self._is_idle.set()

    @contextmanager
    def called(self) -> Iterator[None]:
        """A call to this worker: its failure raises a ServingError, and a lost worker is not chosen again before its
        next heartbeat. Its membership ends a moment after its process; until then retries must not go there."""
        try:
            with typed_errors(self.worker_id):
                yield
        except WorkerUnavailable:
            self.is_suspect = True
            raise

    def heard(self, load: pb.WorkerLoad) -> None:
        self.cached_blocks.difference_update(load.evicted_blocks)
        self.cached_blocks.update(load.stored_blocks)
        load.ClearField("stored_blocks")
        load.ClearField("evicted_blocks")
        self.load = load
        self.heartbeat_s = time.monotonic()
        self.is_suspect = False

    def can_send_to(self, decode: Worker) -> bool:
        return self.mismatch(decode) is None

    def mismatch(self, decode: Worker) -> str | None:
        """Why this prefill worker's KV is of no use to that decode worker; None if it is."""
        if self.hello.transport != decode.hello.transport:
            theirs = f"{decode.worker_id} receives over {decode.hello.transport}"
            return f"{self.worker_id} sends over {self.hello.transport}, {theirs}"
        try:
            KVLayout.from_pb(decode.hello.layout).require_compatible(KVLayout.from_pb(self.hello.layout))
        except LayoutMismatch as error:
            return f"{decode.worker_id} and {self.worker_id}: {error.message}"
        return None

    @property
    def is_fit(self) -> bool:
        """Whether it may be given work: neither a call nor its heartbeat says otherwise."""
        return not self.is_suspect and time.monotonic() - self.heartbeat_s < HEARTBEAT_LOST_S

    def snapshot(self) -> WorkerSnapshot:
        return WorkerSnapshot(self.worker_id, self.num_assigned, self.assigned_tokens)

    def summary(self) -> pb.WorkerSummary:
        return pb.WorkerSummary(
            hello=self.hello,
            load=self.load,
            num_assigned=self.num_assigned,
            num_cached_blocks=len(self.cached_blocks),
            heartbeat_age_s=time.monotonic() - self.heartbeat_s,
        )

    async def close_when_idle(self) -> None:
        """A worker that left the registry may still be finishing requests; each of them has a deadline."""
        await self._is_idle.wait()
        await self._channel.close(grace=None)


class Registry:
    """Worker ids to live workers. Calls `on_change` when one joins, leaves or reports a new load."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._workers: dict[str, Worker] = {}
        self.on_change: Callable[[], None] = lambda: None

    @property
    def workers(self) -> list[Worker]:
        return list(self._workers.values())

    def with_role(self, role: Role) -> list[Worker]:
        """Those that may be given work now."""
        return [worker for worker in self._workers.values() if worker.role is role and worker.is_fit]

    def is_member(self, worker: Worker) -> bool:
        return self._workers.get(worker.worker_id) is worker

    def not_ready_reason(self) -> str | None:
        """Why no request can be served now, or None if one can."""
        if self.with_role(Role.COLOCATED):
            return None
        prefillers, decoders = self.with_role(Role.PREFILL), self.with_role(Role.DECODE)
        missing = [role for role, alive in (("prefill", prefillers), ("decode", decoders)) if not alive]
        if missing:
            return f"no {' and no '.join(missing)} worker is alive"
        mismatches = [prefill.mismatch(decode) for prefill in prefillers for decode in decoders]
        return None if None in mismatches else mismatches[0]

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
        logger.info("%s joined: %s at %s", worker.worker_id, hello.incarnation, hello.address)
        self.on_change()

    def leave(self, worker: Worker) -> None:
        if self.is_member(worker):
            del self._workers[worker.worker_id]
            logger.info("%s left: %s", worker.worker_id, worker.hello.incarnation)
            self.on_change()


class RegistryService(pb_grpc.RegistryServicer):
    """Register: membership lasts exactly as long as the stream. GetClusterStatus: for `pdserve status`."""

    def __init__(self, registry: Registry, status: Callable[[], pb.ClusterStatus]) -> None:
        self._registry = registry
        self._status = status
        self._incarnation = new_incarnation()

    async def Register(
        self, requests: AsyncIterator[pb.WorkerReport], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.RegisterReply]:
        async with answering(context):
            first = await anext(requests, None)
            if first is None or not first.hello.worker_id or not first.hello.incarnation or not first.hello.role:
                raise InvalidRequest("a worker's first report is a hello with its id, role and incarnation")
            worker = Worker(first.hello)
            try:
                self._registry.join(worker)
                yield pb.RegisterReply(router_incarnation=self._incarnation)
                async for report in requests:
                    worker.heard(report.load)
                    self._registry.on_change()
            finally:
                self._registry.leave(worker)
                await worker.close_when_idle()

    async def GetClusterStatus(
        self, request: pb.ClusterStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ClusterStatus:
        return self._status()
