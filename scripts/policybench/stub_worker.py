"""Workers that hold blocks and cost time, and compute nothing. Their prefix cache is the engine's own block manager."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable

from engine.block_manager import BlockManager
from policybench.cost import CostModel
from policybench.job import BLOCK_SIZE, Job
from router.policy import WorkerSnapshot

Schedule = Callable[[float, Callable[[float], None]], None]  # schedule(at_s, call): call(at_s) is made then


class StubWorker:
    """What the router knows of any worker."""

    def __init__(self, name: str, num_blocks: int) -> None:
        self.name = name
        self.cache = BlockManager(num_blocks, BLOCK_SIZE)
        self.num_assigned = 0
        self.assigned_tokens = 0

    def snapshot(self, job: Job, held: dict[str, int]) -> WorkerSnapshot:
        """held: leading blocks by worker, as the index says."""
        cached_tokens = held.get(self.name, 0) * BLOCK_SIZE
        return WorkerSnapshot(self.name, self.num_assigned, self.assigned_tokens, job.input_tokens, cached_tokens)

    def publish(self, job: Job, table: list[int]) -> None:
        for block, block_hash in zip(table, job.hashes, strict=False):
            self.cache.publish(block, block_hash)


class StubPrefill(StubWorker):
    """One prompt after the other, in the order they came."""

    def __init__(self, name: str, num_blocks: int, cost: CostModel, schedule: Schedule) -> None:
        super().__init__(name, num_blocks)
        self._cost = cost
        self._schedule = schedule
        self._queue: deque[tuple[Job, Callable[[Job, float], None]]] = deque()
        self._is_busy = False

    def run(self, job: Job, now_s: float, on_first_token: Callable[[Job, float], None]) -> None:
        self._queue.append((job, on_first_token))
        self._start_next(now_s)

    def _start_next(self, now_s: float) -> None:
        if self._is_busy or not self._queue:
            return
        self._is_busy = True
        job, on_first_token = self._queue.popleft()
        job.cached_tokens = self.cache.reuse(job.prefill_blocks, job.reusable) * BLOCK_SIZE
        self.cache.grow(job.prefill_blocks, job.input_tokens)

        def finish(end_s: float) -> None:
            self.publish(job, job.prefill_blocks)
            self.cache.free(job.prefill_blocks)
            self._is_busy = False
            self._start_next(end_s)
            on_first_token(job, end_s)

        self._schedule(now_s + self._cost.prefill(job.cached_tokens, job.input_tokens - job.cached_tokens), finish)


class StubDecode(StubWorker):
    """All sequences step together; how long a step takes changes when one comes or goes."""

    def __init__(self, name: str, num_blocks: int, max_num_seqs: int, cost: CostModel, schedule: Schedule) -> None:
        super().__init__(name, num_blocks)
        self._max_num_seqs = max_num_seqs
        self._cost = cost
        self._schedule = schedule
        self._order = itertools.count()  # breaks ties in the heap
        self._running: list[tuple[float, int, Job, float, Callable[[float], None]]] = []  # first to end first
        self._context_tokens = 0
        self._num_steps = 0.0  # made so far
        self._counted_s = 0.0  # until when
        self._plan = 0  # what was scheduled under an earlier plan is void

    def has_room(self, job: Job) -> bool:
        needed = self.cache.num_missing([], job.input_tokens + job.output_tokens)
        return self.num_assigned < self._max_num_seqs and needed <= self.cache.num_free

    def reserve(self, job: Job) -> None:
        """For the whole answer, so that nobody is ever preempted."""
        job.moved_tokens = job.input_tokens - self.cache.reuse(job.decode_blocks, job.reusable) * BLOCK_SIZE
        self.cache.grow(job.decode_blocks, job.input_tokens + job.output_tokens)

    def run(self, job: Job, now_s: float, on_end: Callable[[float], None]) -> None:
        """From the first token on, which the prefill worker gave."""
        self.publish(job, job.decode_blocks)
        self._count_steps(now_s)
        end = self._num_steps + job.output_tokens - 1
        heapq.heappush(self._running, (end, next(self._order), job, now_s, on_end))
        self._context_tokens += job.input_tokens
        self._plan_next_end(now_s)

    def _plan_next_end(self, now_s: float) -> None:
        self._plan += 1
        if self._running:
            plan, steps_left = self._plan, max(0.0, self._running[0][0] - self._num_steps)
            self._schedule(now_s + steps_left * self._step_s(), lambda at_s: self._end_first(plan, at_s))

    def _end_first(self, plan: int, now_s: float) -> None:
        if plan != self._plan:
            return
        self._count_steps(now_s)
        _, _, job, start_s, on_end = heapq.heappop(self._running)
        self._context_tokens -= job.input_tokens
        self.cache.free(job.decode_blocks)
        if job.output_tokens > 1:
            job.tpot_s = (now_s - start_s) / (job.output_tokens - 1)
        self._plan_next_end(now_s)
        on_end(now_s)

    def _count_steps(self, now_s: float) -> None:
        if self._running:
            self._num_steps += (now_s - self._counted_s) / self._step_s()
        self._counted_s = now_s

    def _step_s(self) -> float:
        return self._cost.step(len(self._running), self._context_tokens)
