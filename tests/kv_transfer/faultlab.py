"""Thousands of transfers between real workers over links that fail: python -m tests.kv_transfer.faultlab --help

Whatever happens to a link, three things hold: no wrong KV ever reaches a batch, nothing is left behind on either side,
and every request ends, with the right tokens or with one typed error.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from random import Random

import torch

from common.errors import ServingError
from tests.kv_transfer.faults import FRAME_FAULTS, PAYLOAD_FAULTS, Fault, FaultPlan
from tests.kv_transfer.lab_journey import Journey, Wish
from tests.kv_transfer.lab_tally import Tally, add_up
from tests.kv_transfer.lab_workers import DecodeNode, LabNetwork, Patience, PrefillNode
from tests.kv_transfer.truth import VOCAB_SIZE

NUM_PREFILLS, NUM_DECODES = 2, 2
BOUND_S = 60.0  # far beyond all patience together: whoever needs so long is stuck
SETTLED_S = 15.0  # gloo waits 10 s for an end that has died before it came

RATES = {
    **dict.fromkeys((*FRAME_FAULTS, *PAYLOAD_FAULTS), 0.02),
    Fault.CUT: 0.005,
    Fault.KILL_SOURCE: 0.001,
    Fault.KILL_DESTINATION: 0.001,
}


class Lab:
    """Some workers of both kinds, replaced as they die, and the tally of what was asked of them."""

    def __init__(self, around: LabNetwork) -> None:
        self.tally = Tally()
        self.prefills: list[PrefillNode] = []
        self.decodes: list[DecodeNode] = []
        self._around = around
        self._restarts: set[asyncio.Task[None]] = set()
        self._is_over = False

    async def start(self) -> None:
        for place in range(NUM_PREFILLS):
            self.prefills.append(self._new_prefill(place))
        for place in range(NUM_DECODES):
            self.decodes.append(await self._new_decode(place, ""))

    async def request(self, wish: Wish) -> None:
        """To its end."""
        self.tally.requests += 1
        journey = asyncio.create_task(Journey(self, self.tally, self._around.plan.random, wish).run())
        await asyncio.wait([journey], timeout=BOUND_S if wish.leaves_after_s is None else wish.leaves_after_s)
        is_cancelled = not journey.done()
        journey.cancel()
        await asyncio.wait([journey], timeout=BOUND_S)
        if not journey.done() or (is_cancelled and wish.leaves_after_s is None):
            self.tally.stuck.append(f"prompt {wish.prompt}")
        elif journey.cancelled():
            self.tally.left += 1
        else:
            self._count(journey.exception())

    async def settle(self) -> None:
        """All requests have ended: what is still held then is leaked."""
        await self._restarted()
        give_up_at = time.monotonic() + SETTLED_S
        while (leaks := await self._leaks()) and time.monotonic() < give_up_at:
            await asyncio.sleep(0.01)
        self.tally.leaked += leaks

    async def close(self) -> None:
        self._is_over = True
        await self._restarted()
        for prefill in self.prefills:
            await self._retire_prefill(prefill)
        for decode in self.decodes:
            await self._retire_decode(decode)

    def _count(self, error: BaseException | None) -> None:
        if error is None:
            self.tally.committed += 1
        elif isinstance(error, ServingError):
            self.tally.refused[type(error).__name__] += 1
        else:
            self.tally.wrong.append(f"an error that nobody planned: {error!r}")
            self.tally.refused[type(error).__name__] += 1

    async def _leaks(self) -> list[str]:
        of_prefills = [leak for prefill in self.prefills for leak in await prefill.leaks()]
        of_decodes = [leak for decode in self.decodes for leak in await decode.leaks()]
        return of_prefills + of_decodes

    @property
    def wrong(self) -> list[str]:
        """So far."""
        now = [*(node.check for node in self.prefills), *(node.check for node in self.decodes)]
        return [*self.tally.wrong, *(wrong for check in now for wrong in check.wrong)]

    async def _restarted(self) -> None:
        while self._restarts:
            await asyncio.wait(set(self._restarts))

    # ---------------------------------------------------------------- workers come and go

    def _new_prefill(self, place: int) -> PrefillNode:
        prefill = PrefillNode(self._around)

        async def replace() -> None:
            await self._retire_prefill(prefill)
            self.prefills[place] = self._new_prefill(place)

        prefill.process.on_death = lambda: self._on_death(replace)
        return prefill

    async def _new_decode(self, place: int, address: str) -> DecodeNode:
        decode = DecodeNode(self._around, address)
        bound = await decode.start()

        async def replace() -> None:
            await self._retire_decode(decode)
            self.decodes[place] = await self._new_decode(place, bound)

        decode.process.on_death = lambda: self._on_death(replace)
        return decode

    def _on_death(self, replace: Callable[[], Coroutine[object, object, None]]) -> None:
        if self._is_over:
            return
        self.tally.deaths += 1
        restart = asyncio.create_task(replace())
        self._restarts.add(restart)
        restart.add_done_callback(self._on_restarted)

    def _on_restarted(self, restart: asyncio.Task[None]) -> None:
        self._restarts.discard(restart)
        if not restart.cancelled() and (error := restart.exception()) is not None:
            self.tally.wrong.append(f"a restart failed: {error!r}")

    async def _retire_prefill(self, prefill: PrefillNode) -> None:
        self.tally.leaked += await prefill.stop()
        self.tally.wrong += prefill.check.wrong
        add_up(self.tally.sources, prefill.sender.stats)

    async def _retire_decode(self, decode: DecodeNode) -> None:
        self.tally.leaked += await decode.stop()
        self.tally.wrong += decode.check.wrong
        add_up(self.tally.destinations, decode.receiver.stats)


@asynccontextmanager
async def running_lab(kind: str, plan: FaultPlan, patience: Patience | None = None) -> AsyncIterator[Lab]:
    """After its end the tally also names the tasks and threads that were left behind."""
    tasks_before, threads_before = asyncio.all_tasks(), set(threading.enumerate())
    lab = Lab(LabNetwork(kind, plan, patience or Patience()))
    await lab.start()
    try:
        yield lab
        await lab.settle()
    finally:
        await lab.close()
    give_up_at = time.monotonic() + SETTLED_S
    while (left := _left_behind(tasks_before, threads_before)) and time.monotonic() < give_up_at:
        await asyncio.sleep(0.01)
    lab.tally.leaked += left


def new_wishes(random: Random, num_requests: int, leaving: float = 0.08, aborted: float = 0.05) -> list[Wish]:
    """leaving: share of clients that go away at some moment. aborted: share of attempts of which one leg is cancelled.
    Prompts share beginnings, so that both prefix caches come into play."""
    stems = [[random.randrange(VOCAB_SIZE) for _ in range(length)] for length in (8, 24, 40)]

    def prompt() -> list[int]:
        stem = random.choice(stems)[: random.choice((0, 0, 8, 24, 40))]
        return stem + [random.randrange(VOCAB_SIZE) for _ in range(random.choice((1, 1, 2, 5, 20, 60)))]

    return [
        Wish(prompt(), random.random() * 0.05 if random.random() < leaving else None, aborted)
        for _ in range(num_requests)
    ]


async def grant(lab: Lab, wishes: Sequence[Wish], num_in_flight: int = 24) -> None:
    queue = list(reversed(wishes))

    async def client() -> None:
        while queue:
            await lab.request(queue.pop())

    await asyncio.gather(*(client() for _ in range(num_in_flight)))


def _left_behind(tasks: set[asyncio.Task[object]], threads: set[threading.Thread]) -> list[str]:
    new_tasks = [f"task {task!r}" for task in asyncio.all_tasks() - tasks - {asyncio.current_task()}]
    new_threads = [
        f"thread {thread.name}"
        for thread in set(threading.enumerate()) - threads
        if thread.name.startswith(("kv-", "engine"))
    ]
    return new_tasks + new_threads


async def run(kind: str, num_requests: int, seed: int) -> tuple[Tally, FaultPlan]:
    random = Random(seed)
    plan = FaultPlan(random, RATES)
    async with running_lab(kind, plan) as lab:
        await grant(lab, new_wishes(random, num_requests))
    return lab.tally, plan


def main() -> None:
    parser = argparse.ArgumentParser(description="Send KV over links that fail, and count what came of it.")
    parser.add_argument("--transfers", type=int, default=10_000)
    parser.add_argument("--transport", default="loopback")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)  # each fault is a warning somewhere
    start_s = time.monotonic()
    tally, plan = asyncio.run(run(arguments.transport, arguments.transfers, arguments.seed))
    print(f"{arguments.transfers} transfers over {arguments.transport}, seed {arguments.seed}")
    print(tally.table())
    print("\nfaults     " + ", ".join(f"{fault} {count}" for fault, count in _by_fault(plan).items()))
    print(f"seconds    {time.monotonic() - start_s:.0f}")
    for found in tally.faults_found[:20]:
        print("FOUND", found)
    raise SystemExit(bool(tally.faults_found))


def _by_fault(plan: FaultPlan) -> dict[str, int]:
    return {fault: sum(count for (kind, _), count in plan.happened.items() if kind is fault) for fault in Fault}


if __name__ == "__main__":
    main()
