"""`pdserve status`: who is there, how busy, which pairs fit and how fast, and whether requests can be served."""

from __future__ import annotations

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from cluster.pool_view import pool_views
from cluster.registry_client import cluster_status
from cluster.running import RunningDeployment
from common.errors import UnprovenCaller
from common.pb import serving_pb2 as pb


async def show_status(running: RunningDeployment, console: Console, timeout_s: float = 5.0) -> int:
    """Print the table; 0 when requests can be served, else 1.

    Raises: WorkerUnavailable when no router answers; UnprovenCaller when it has another secret.
    """
    try:
        status = await cluster_status(running.control_address, running.access, timeout_s)
    except UnprovenCaller as error:
        where = "name its config with --config, or the folder of its `pdserve up` with --logs"
        raise UnprovenCaller(f"{error.message}: {where}") from error
    console.print(status_table(status))
    if status.pairs:
        console.print(pair_table(status))
    for view in pool_views(status).values():
        if view.num_wished or view.under_way:
            console.print(str(view), highlight=False, markup=False, soft_wrap=True)
    for pair in status.pairs:
        if pair.reason:
            console.print(pair.reason, highlight=False, markup=False, soft_wrap=True)
    console.print(
        f"{'ready' if status.is_ready else f'not ready: {status.reason}'}, up {status.uptime_s:.0f} s, "
        f"{status.num_queued} queued, {status.num_active} active",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    return 0 if status.is_ready else 1


STANDINGS = {pb.PAIR_UNCHECKED: "unchecked", pb.PAIR_GOOD: "good", pb.PAIR_REFUSED: "refused"}


def status_table(status: pb.ClusterStatus) -> Table:
    table = Table(title=f"pdserve {status.model}", title_justify="left", box=SIMPLE, pad_edge=False)
    for column in ("worker", "address", "state"):
        table.add_column(column, overflow="fold")
    for column in ("seen", "assigned", "waiting", "running", "blocks used"):
        table.add_column(column, justify="right")
    for worker in sorted(status.workers, key=lambda worker: (worker.hello.role, worker.hello.worker_id)):
        load = worker.load
        table.add_row(
            worker.hello.worker_id,
            worker.hello.address,
            worker.unfit_reason or "fit",
            f"{worker.heartbeat_age_s:.1f} s",
            str(worker.num_assigned),
            str(load.num_waiting + load.num_reserved),
            str(load.num_running),
            f"{load.total_blocks - load.free_blocks}/{load.total_blocks}",
        )
    return table


def pair_table(status: pb.ClusterStatus) -> Table:
    """Speeds are the best that the prefill side has measured."""
    table = Table(box=SIMPLE, pad_edge=False)
    for column in ("prefill", "decode", "pair", "transport"):
        table.add_column(column, overflow="fold")
    for column in ("GB/s", "round trip"):
        table.add_column(column, justify="right")
    for pair in status.pairs:
        table.add_row(
            pair.prefill_worker, pair.decode_worker, STANDINGS.get(pair.standing, "unknown"), *_link_cells(pair)
        )
    return table


def _link_cells(pair: pb.PairSummary) -> tuple[str, str, str]:
    link = pair.link
    if not link.bytes_per_s:
        return (link.transport or "-", "-", "-")
    return (link.transport, f"{link.bytes_per_s / 1e9:.2f}", f"{link.round_trip_s * 1e3:.2f} ms")
