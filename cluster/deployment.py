"""One deployment from start to stop: members under a supervisor, and something done while they run."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing

from cluster.display import Display
from cluster.host import WorkerHost
from cluster.plan import Plan
from cluster.pools import Pools
from cluster.registry_client import follow_status
from cluster.steering import steer
from cluster.supervisor import MemberEvent, Supervisor


async def run_deployment(plan: Plan, host: WorkerHost, display: Display, work: Coroutine[None, None, None]) -> None:
    """Start every member, do `work`, stop every member: when it is done, when it fails, when this task is cancelled.

    Raises: ConfigError or MemberGivenUp when a member cannot be started; whatever `work` raises.
    """

    def on_event(event: MemberEvent) -> None:
        display.member_event(event)
        pools.noted(event)

    supervisor = Supervisor(host, on_event)
    pools = Pools(plan, supervisor)
    tasks = {asyncio.create_task(each) for each in (supervisor.run(plan.specs), work, steer(plan, pools))}
    try:
        finished, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in finished:
            task.result()
    finally:
        display.doing("stopping")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await host.close()


async def until_ready(plan: Plan, display: Display) -> None:
    """Through each of the routers: a client does not choose which one answers."""
    display.doing("starting")
    access = plan.config.security.cluster_access()
    for address in plan.control_addresses:
        async with aclosing(follow_status(address, access)) as statuses:
            async for status in statuses:
                display.cluster_status(status, plan)
                if status.is_ready:
                    break


async def announce_members(plan: Plan, display: Display) -> None:
    """Ready, then every worker that comes (back) later, for ever."""
    await until_ready(plan, display)
    display.ready(plan)
    async with aclosing(
        follow_status(plan.control_address, plan.config.security.cluster_access(), every_s=1.0)
    ) as statuses:
        async for status in statuses:
            display.cluster_status(status, plan)


async def until_signal(work: Awaitable[None], on_signal: Callable[[int], None] = lambda count: None) -> None:
    """Do `work` to its end or to the first SIGINT, SIGTERM or SIGHUP, which is a wish to stop and no error.

    on_signal: is told of each, by how many there have been. What `work` does to end is not disturbed by later ones.
    """
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    num_signals = 0

    def stop() -> None:
        nonlocal num_signals
        num_signals += 1
        on_signal(num_signals)
        if num_signals == 1:
            task.cancel()

    for number in signals:
        loop.add_signal_handler(number, stop)
    try:
        await task
    except asyncio.CancelledError:
        if not num_signals:
            raise
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
