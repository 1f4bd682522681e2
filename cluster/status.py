"""`pdserve status`: who is there, how busy, and whether requests can be served."""

from __future__ import annotations

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from cluster.registry_client import cluster_status
from common.pb import serving_pb2 as pb


async def show_status(control_address: str, console: Console, timeout_s: float = 5.0) -> int:
    """Print the table; 0 when requests can be served, else 1. Raises: WorkerUnavailable when no router answers."""
    status = await cluster_status(control_address, timeout_s)
    console.print(status_table(status))
    console.print(
        f"{'ready' if status.is_ready else f'not ready: {status.reason}'}, up {status.uptime_s:.0f} s, "
        f"{status.num_queued} queued, {status.num_active} active",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    return 0 if status.is_ready else 1


def status_table(status: pb.ClusterStatus) -> Table:
    table = Table(title=f"pdserve {status.model}", title_justify="left", box=SIMPLE, pad_edge=False)
    for column in ("worker", "address"):
        table.add_column(column, overflow="fold")
    for column in ("seen", "assigned", "waiting", "running", "blocks used"):
        table.add_column(column, justify="right")
    for worker in sorted(status.workers, key=lambda worker: (worker.hello.role, worker.hello.worker_id)):
        load = worker.load
        table.add_row(
            worker.hello.worker_id,
            worker.hello.address,
            f"{worker.heartbeat_age_s:.1f} s",
            str(worker.num_assigned),
            str(load.num_waiting + load.num_reserved),
            str(load.num_running),
            f"{load.total_blocks - load.free_blocks}/{load.total_blocks}",
        )
    return table
