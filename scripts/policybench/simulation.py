"""The queue, the choice and the clock. As router/admission.py does it: first come, first served, placed when a prefill
worker and a decode worker have room, by the router's own policies, with what the heartbeats told its own index.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from common.membership import HEARTBEAT_S
from policybench.cost import CostModel
from policybench.job import BLOCK_SIZE, Job
from policybench.stub_worker import StubDecode, StubPrefill, StubWorker
from router.policy import Policies, PolicyName, make_policies
from router.prefix_index import PrefixIndex

MAX_INDEX_BLOCKS = 1_000_000


@dataclass(frozen=True)
class Pools:
    num_prefill: int
    num_decode: int
    cache_tokens: int  # KV memory of each worker
    max_num_seqs: int = 64

    @property
    def num_blocks(self) -> int:
        return self.cache_tokens // BLOCK_SIZE

    @property
    def longest_request(self) -> int:
        """Tokens, prompt and answer together, that any worker can hold."""
        return self.num_blocks * BLOCK_SIZE


def simulate(jobs: Sequence[Job], pools: Pools, policy: PolicyName, seed: int) -> None:
    """Replays the jobs, in order of arrival, to the end of the last one, and writes what became of each into it."""
    Simulation(jobs, pools, make_policies(policy, random.Random(seed))).run()


class Simulation:
    def __init__(self, jobs: Sequence[Job], pools: Pools, policies: Policies) -> None:
        cost, num_blocks = CostModel(), pools.num_blocks
        self._policies = policies
        self._index = PrefixIndex(MAX_INDEX_BLOCKS)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._queue: deque[Job] = deque()
        self._num_left = len(jobs)
        names = [f"prefill-{number}" for number in range(pools.num_prefill)]
        self._prefill = {name: StubPrefill(name, num_blocks, cost, self._schedule) for name in names}
        names = [f"decode-{number}" for number in range(pools.num_decode)]
        self._decode = {name: StubDecode(name, num_blocks, pools.max_num_seqs, cost, self._schedule) for name in names}
        for job in jobs:
            self._schedule(job.arrival_s, partial(self._arrive, job))
        workers: list[StubWorker] = [*self._prefill.values(), *self._decode.values()]
        for number, worker in enumerate(workers):
            self._index.join(worker.name)
            first_s = HEARTBEAT_S * number / len(workers)  # they do not beat together
            self._schedule(first_s, partial(self._heartbeat, worker))

    def run(self) -> None:
        while self._num_left:
            now_s, _, call = heapq.heappop(self._events)
            call(now_s)

    def _schedule(self, at_s: float, call: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), call))

    def _heartbeat(self, worker: StubWorker, now_s: float) -> None:
        events = worker.cache.drain_events()
        self._index.update(worker.name, events.stored, events.evicted)
        self._schedule(now_s + HEARTBEAT_S, partial(self._heartbeat, worker))

    def _arrive(self, job: Job, now_s: float) -> None:
        self._queue.append(job)
        self._dispatch(now_s)

    def _dispatch(self, now_s: float) -> None:
        while self._queue and self._place(self._queue[0], now_s):
            self._queue.popleft()

    def _place(self, job: Job, now_s: float) -> bool:
        held = self._index.leading_blocks(job.reusable)
        prefillers = [worker.snapshot(job, held) for worker in self._prefill.values()]
        prefillers = [snapshot for snapshot in prefillers if snapshot.has_room_to_prefill]
        decoders = [worker.snapshot(job, held) for worker in self._decode.values() if worker.has_room(job)]
        if not prefillers or not decoders:
            return False
        choice = self._policies.prefill(prefillers)
        prefill = self._prefill[choice.worker_id]
        decode = self._decode[self._policies.decode(decoders).worker_id]
        _count(prefill, 1, choice.uncached_tokens)
        _count(decode, 1, job.input_tokens)
        decode.reserve(job)

        def has_first_token(job: Job, at_s: float) -> None:
            job.ttft_s = at_s - job.arrival_s
            _count(prefill, -1, -choice.uncached_tokens)
            decode.run(job, at_s, partial(self._end, job, decode))
            self._dispatch(at_s)

        prefill.run(job, now_s, has_first_token)
        return True

    def _end(self, job: Job, decode: StubDecode, now_s: float) -> None:
        _count(decode, -1, -job.input_tokens)
        self._num_left -= 1
        self._dispatch(now_s)


def _count(worker: StubWorker, num_requests: int, num_tokens: int) -> None:
    worker.num_assigned += num_requests
    worker.assigned_tokens += num_tokens
