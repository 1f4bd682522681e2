"""`pdserve drain`: a worker takes no new work, ends what it has, or hands it to others after a bound, and leaves."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass

from rich.console import Console

from cluster.pool_view import num_under_way
from cluster.registry_client import drain_worker, follow_status
from cluster.running import RunningDeployment
from common.pb import serving_pb2 as pb


@dataclass(frozen=True)
class DrainWish:
    worker_id: str
    timeout_s: float | None  # None: the worker's own


async def drain(found: RunningDeployment, wish: DrainWish, console: Console) -> int:
    """Through one router; the worker itself tells the others. Returns 0 once it has left.

    Raises: InvalidRequest if there is no such worker, WorkerUnavailable.
    """
    await drain_worker(found.control_address, found.access, wish.worker_id, wish.timeout_s or 0.0)
    told, incarnation = "", None
    async with aclosing(follow_status(found.control_address, found.access)) as statuses:
        async for status in statuses:
            worker = next((each for each in status.workers if each.hello.worker_id == wish.worker_id), None)
            if worker is None or incarnation not in (None, worker.hello.incarnation):  # another one has its name
                break
            incarnation = worker.hello.incarnation
            if (now := _progress(worker)) != told:
                console.print(now, highlight=False, markup=False, soft_wrap=True)
            told = now
    console.print(f"{wish.worker_id} has left", highlight=False, markup=False)
    if not status.is_ready:
        console.print(f"nothing can be served now: {status.reason}", highlight=False, markup=False, soft_wrap=True)
    return 0


def _progress(worker: pb.WorkerSummary) -> str:
    return f"{worker.hello.worker_id} is draining: {num_under_way(worker.load)} under way"
