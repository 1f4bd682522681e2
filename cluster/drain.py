"""`pdserve drain`: a worker takes no new work, ends what it has, or hands it to others after a bound, and leaves."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass

from rich.console import Console

from cluster.registry_client import drain_worker, follow_status
from common.pb import serving_pb2 as pb


@dataclass(frozen=True)
class DrainWish:
    control_address: str  # of a router; the worker itself tells the others
    worker_id: str
    timeout_s: float | None  # None: the worker's own


async def drain(wish: DrainWish, console: Console) -> int:
    """Returns 0 once it has left. Raises: InvalidRequest if there is no such worker, WorkerUnavailable."""
    await drain_worker(wish.control_address, wish.worker_id, wish.timeout_s or 0.0)
    told, incarnation = "", None
    async with aclosing(follow_status(wish.control_address)) as statuses:
        async for status in statuses:
            worker = next((each for each in status.workers if each.hello.worker_id == wish.worker_id), None)
            if worker is None or incarnation not in (None, worker.hello.incarnation):  # another one has its name
                break
            incarnation = worker.hello.incarnation
            if (now := _progress(worker)) != told:
                console.print(now, highlight=False, markup=False, soft_wrap=True)
            told = now
    console.print(f"{wish.worker_id} has left", highlight=False, markup=False)
    return 0


def _progress(worker: pb.WorkerSummary) -> str:
    load = worker.load
    num_under_way = load.num_running + load.num_waiting + load.num_reserved
    return f"{worker.hello.worker_id} is draining: {num_under_way} under way"
