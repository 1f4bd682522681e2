"""One worker as this router knows it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from common.cluster_access import NO_SECRET, ClusterAccess, connect
from common.config import Role
from common.errors import LayoutMismatch, WorkerDraining, WorkerUnavailable
from common.kv_layout import KVLayout
from common.pb import serving_pb2 as pb
from common.pb import serving_pb2_grpc as pb_grpc
from common.rpc import typed_errors
from router.backlog import PromptBacklog
from router.breaker import Breaker
from router.policy import WorkerSnapshot

ROLES = {pb.ROLE_PREFILL: Role.PREFILL, pb.ROLE_DECODE: Role.DECODE, pb.ROLE_COLOCATED: Role.COLOCATED}

# A worker whose engine hangs keeps its connections; this is far longer than any step.
HEARTBEAT_LOST_S = 30.0


class Worker:
    """One incarnation of one worker: its hello, its last heartbeat, its channel, and this router's requests on it."""

    def __init__(self, hello: pb.WorkerHello, access: ClusterAccess = NO_SECRET) -> None:
        self.hello = hello
        self.worker_id = hello.worker_id
        self.role = ROLES[hello.role]
        self.load = pb.WorkerLoad()
        self.clock_skew_s = 0.0  # how far its clock is ahead of ours, the heartbeat's way included
        self.joined_s = self.heartbeat_s = time.monotonic()
        self.is_draining = False  # it says so, or refused a request for it; nothing takes that back
        self.drain_order: pb.DrainOrder | None = None  # to be told to it with the next reply to a heartbeat
        self.is_suspect = False  # a call to it failed, and it has not been heard of since
        self.breaker = Breaker(time.monotonic)  # of its only leg: prefill or decode
        self.num_assigned = 0
        self.prompts = PromptBacklog(time.monotonic)
        self.best_s_per_token: float | None = None  # of prompts, the least that it has told
        self.assigned_tokens = 0  # theirs, as WorkerSnapshot counts them
        self._channel = connect(hello.address, access)
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
            with self.breaker.given():
                yield
        finally:
            self.num_assigned -= 1
            self.assigned_tokens -= num_tokens
            if self.num_assigned == 0:
                self._is_idle.set()

    @contextmanager
    def called(self) -> Iterator[None]:
        """A call to this worker: its failure raises a ServingError, and a lost worker is not chosen again before its
        next heartbeat. Its membership ends a moment after its process; until then retries must not go there. One that
        goes on being heard of and being lost is left to its breaker."""
        try:
            with typed_errors(self.worker_id):
                yield
        except WorkerDraining:
            self.is_draining = True
            raise
        except WorkerUnavailable:
            self.is_suspect = True
            self.breaker.failed()
            raise

    def heard(self, load: pb.WorkerLoad) -> None:
        """A heartbeat. What it says of the prefix cache is kept in the registry's index, not here."""
        load.ClearField("stored_blocks")
        load.ClearField("evicted_blocks")
        self.load = load
        self.prompts.heard(load.uncached_tokens)
        if load.prefill_s_per_token > 0:
            self.best_s_per_token = min(load.prefill_s_per_token, self.best_s_per_token or math.inf)
        self.heartbeat_s = time.monotonic()
        self.clock_skew_s = load.clock_s - time.time()
        self.is_suspect = False
        self.is_draining = self.is_draining or load.is_draining

    def mismatch(self, decode: Worker) -> str | None:
        """Why this prefill worker's KV is of no use to that decode worker; None if it is."""
        if self.hello.transport != decode.hello.transport:
            receives = f"{decode.worker_id} receives over {decode.hello.transport}"
            return f"transfer.transport differs: {self.worker_id} sends over {self.hello.transport}, {receives}"
        if self.hello.wire_dtype != decode.hello.wire_dtype:
            reads = f"{decode.worker_id} reads {decode.hello.wire_dtype!r}"
            return f"transfer.wire_dtype differs: {self.worker_id} writes {self.hello.wire_dtype!r}, {reads}"
        mine, theirs = KVLayout.from_pb(self.hello.layout), KVLayout.from_pb(decode.hello.layout)
        if self.hello.wire_dtype not in ("", "same"):  # what travels has neither side's dtype
            mine = mine.with_dtype(theirs.dtype)
        try:
            theirs.require_compatible(mine, decode.worker_id, self.worker_id)
        except LayoutMismatch as error:
            return error.message
        return None

    @property
    def is_fit(self) -> bool:
        """Whether it may be given work: neither its calls nor its heartbeat say otherwise."""
        return not self.unfit_reason

    @property
    def unfit_reason(self) -> str:
        """Why it is given no work now; empty if it is."""
        if self.is_draining:
            return "draining"
        if time.monotonic() - self.heartbeat_s >= HEARTBEAT_LOST_S:
            return "silent"
        if self.is_suspect:
            return "suspect: a call to it failed"
        if not self.breaker.admits:
            return f"its calls keep failing ({self.breaker.circuit})"
        return ""

    def snapshot(self, prompt_tokens: int, cached_tokens: int, queue_tokens: int) -> WorkerSnapshot:
        """For the choice of who serves a prompt, of which this worker's prefix cache holds `cached_tokens`."""
        tokens = self.assigned_tokens
        if self.role is Role.PREFILL:  # of other routers' prompts nothing is counted, of ours what is computed is not
            tokens = min(tokens, self.prompts.tokens)
        return WorkerSnapshot(self.worker_id, self.num_assigned, tokens, prompt_tokens, cached_tokens, queue_tokens)

    def summary(self, num_cached_blocks: int) -> pb.WorkerSummary:
        return pb.WorkerSummary(
            hello=self.hello,
            load=self.load,
            num_assigned=self.num_assigned,
            num_cached_blocks=num_cached_blocks,
            heartbeat_age_s=time.monotonic() - self.heartbeat_s,
            unfit_reason=self.unfit_reason,
            clock_skew_s=self.clock_skew_s,
        )

    async def close_when_idle(self) -> None:
        """A worker that left the registry may still be finishing requests; each of them has a deadline."""
        await self._is_idle.wait()
        await self._channel.close(grace=None)
