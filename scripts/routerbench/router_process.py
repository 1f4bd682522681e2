"""The router that is measured: `python -m router` on a core of its own, on free loopback ports, with a log file."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from cluster.host import MemberSpec
from cluster.plan import LOOPBACK, Plan, with_free_ports
from cluster.processes import ProcessHost, ProcessMember, last_words, python_command
from cluster.registry_client import follow_status
from common.cluster_access import NO_SECRET
from common.config import ServeConfig

POLL_S = 0.05
START_S = 60.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
ROUTER = MemberSpec("router", None)


class RouterFailed(Exception):
    """It did not become ready, or died."""


@dataclass(frozen=True)
class RouterProcess:
    """A running router."""

    pid: int
    plan: Plan
    log_path: Path

    def cpu_s(self) -> float:
        """Of all its threads, since its start."""
        fields = Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S  # utime and stime, proc(5)

    def resident_bytes(self) -> int:
        status = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii")
        [line] = [line for line in status.splitlines() if line.startswith("VmRSS:")]
        return int(line.split()[1]) * 1024

    async def until_ready(self, num_workers: int) -> None:
        """Until requests can be served, by as many workers. Raises: TimeoutError."""
        async with aclosing(follow_status(self.plan.control_address, NO_SECRET, POLL_S)) as statuses:
            async for status in statuses:
                if status.is_ready and len(status.workers) == num_workers:
                    return


@asynccontextmanager
async def running_router(config: ServeConfig, core: int, folder: Path) -> AsyncIterator[RouterProcess]:
    """Its log and its configuration go to `folder`. Raises: RouterFailed when it does not begin to answer."""
    plan = with_free_ports(Plan(_quiet(config)))
    config_path = folder / "serve.yaml"
    plan.write(config_path)
    host = ProcessHost(lambda spec: python_command(spec, config_path, plan.control_addresses), folder)
    with pinned_to({core}):  # children inherit it
        member = await host.start(ROUTER)
    try:
        router = RouterProcess(member.pid, plan, folder / f"{ROUTER.name}.log")
        await _until_answering(router, member)
        yield router
    finally:
        await member.stop()


@contextmanager
def pinned_to(cores: set[int]) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


async def _until_answering(router: RouterProcess, member: ProcessMember) -> None:
    answering = asyncio.create_task(_answer_of(router.plan.control_address))
    ending = asyncio.create_task(member.ended())
    try:
        await asyncio.wait({answering, ending}, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise RouterFailed(f"the router did not begin to answer: {last_words(router.log_path)}")
        answering.result()
    finally:
        for task in (answering, ending):
            task.cancel()
        await asyncio.gather(answering, ending, return_exceptions=True)


async def _answer_of(control_address: str) -> None:
    async with aclosing(follow_status(control_address, NO_SECRET, POLL_S)) as statuses:
        async for _ in statuses:
            return


def _quiet(config: ServeConfig) -> ServeConfig:
    """On ports that disturb nothing else that serves here, and with room for all that the bench sends."""
    changes = {"host": LOOPBACK, "http_port": 0, "grpc_port": 0, "control_port": 0, "max_queued_requests": 100_000}
    return config.model_copy(update={"router": config.router.model_copy(update=changes)})
