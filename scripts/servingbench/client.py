"""The bench's own client: one request over gRPC, with the time of every token and the router's account of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import count, pairwise
from statistics import median
from typing import Any

from common.cluster_access import ClusterAccess, connect
from common.lifecycle import Stage
from common.pb import serving_pb2 as pb
from common.pb.serving_pb2_grpc import InferenceStub, PrefillStub
from common.rpc import new_channel, typed_errors
from loadgen.workload import ClosedLoop, LengthRange, Workload, plan
from servingbench.figures import HandoffSample, PromptSample

TIMEOUT_S = 300.0


class BenchFailed(Exception):
    """The system answered, but not in the way that was to be measured."""


@dataclass(frozen=True)
class Answer:
    token_s: list[float]  # when each token came; of one monotonic clock
    timings: pb.Timings

    def stage_s(self, stage: Stage) -> float:
        """By the router's account."""
        return {stage.name: stage.seconds for stage in self.timings.stages}[stage]

    def sample(self, num_bytes: int | None) -> PromptSample:
        """`num_bytes`: of KV that were handed over; None when colocated."""
        first_gap_s, *later_gaps_s = (later - earlier for earlier, later in pairwise(self.token_s))
        handoff = None if num_bytes is None else self._handoff(num_bytes)
        return PromptSample(self.timings.ttft_s, first_gap_s, median(later_gaps_s), handoff)

    def _handoff(self, num_bytes: int) -> HandoffSample:
        return HandoffSample(self.stage_s(Stage.TRANSFER), self.stage_s(Stage.DECODE_WAIT), num_bytes)


class Client:
    """Talks to one running system. Make one with `connected`."""

    def __init__(self, inference: Any, prefill: Any | None, vocab_size: int) -> None:
        self._inference = inference
        self._prefill = prefill  # None: colocated
        self._vocab_size = vocab_size
        self._seeds = count(1)

    @property
    def is_pair(self) -> bool:
        return self._prefill is not None

    def prompts(self, num_prompts: int, num_tokens: int) -> list[list[int]]:
        """Random token ids that share no prefix with any prompt before: the same ones for every system."""
        lengths = LengthRange(num_tokens, num_tokens)
        seed = next(self._seeds)
        workload = Workload(ClosedLoop(1), lengths, vocab_size=self._vocab_size, num_requests=num_prompts, seed=seed)
        return [list(request.prompt) for request in plan(workload) if not isinstance(request.prompt, str)]

    async def ask(self, prompt: list[int], num_tokens: int) -> Answer:
        """Exactly `num_tokens` greedy tokens. Raises: ServingError, BenchFailed."""
        request = pb.GenerateRequest(
            prompt_token_ids=pb.TokenIds(ids=prompt),
            sampling=pb.SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True),
        )
        token_s: list[float] = []
        last = pb.GenerateResponse()
        with typed_errors("the router"):
            async for last in self._inference.Generate(request, timeout=TIMEOUT_S):
                token_s += [time.monotonic()] * len(last.token_ids)
        self._require_as_intended(last.timings, len(token_s), num_tokens)
        return Answer(token_s, last.timings)

    async def ask_each(self, prompts: list[list[int]], num_tokens: int) -> list[Answer]:
        """All at once. Raises: as `ask`, for the first that fails, which ends the others."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self.ask(prompt, num_tokens)) for prompt in prompts]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def kv_bytes_sent(self) -> int | None:
        """By the prefill worker, ever; None when colocated. Raises: ServingError."""
        if self._prefill is None:
            return None
        with typed_errors("the prefill worker"):
            status = await self._prefill.GetStatus(pb.WorkerStatusRequest(), timeout=TIMEOUT_S)
        return int(status.counters["kv_transfer_bytes_total"])

    def _require_as_intended(self, timings: pb.Timings, num_tokens: int, num_asked: int) -> None:
        if num_tokens != num_asked:
            raise BenchFailed(f"{num_asked} tokens were asked for and {num_tokens} came")
        if timings.attempts != 1:
            raise BenchFailed(f"a request took {timings.attempts} attempts, so its times say nothing")
        if bool(timings.prefill_worker) is not self.is_pair:
            raise BenchFailed(f"the prompt was computed by {timings.prefill_worker or timings.decode_worker}")


@asynccontextmanager
async def connected(grpc_address: str, workers: list[pb.WorkerHello], access: ClusterAccess) -> AsyncIterator[Client]:
    async with AsyncExitStack() as stack:
        inference = InferenceStub(await stack.enter_async_context(new_channel(grpc_address)))
        prefill = None
        for worker in workers:
            if worker.role == pb.ROLE_PREFILL:
                prefill = PrefillStub(await stack.enter_async_context(connect(worker.address, access)))
        yield Client(inference, prefill, workers[0].vocab_size)
