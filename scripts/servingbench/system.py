"""One configuration of the system as processes of this machine, on free loopback ports, for as long as some work takes.

Unlike `pdserve up`, a member that dies is not started again: what would be measured then is another system.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from cluster.host import MemberSpec
from cluster.plan import LOOPBACK, Overrides, Plan, make_plan, with_free_ports
from cluster.processes import ProcessHost, python_command
from cluster.registry_client import follow_status
from cluster.run_secret import with_secret
from cluster.supervisor import Backoff, MemberEvent, Supervisor
from common.config import Role, ServeConfig
from common.pb import serving_pb2 as pb

T = TypeVar("T")

POLL_S = 0.05
UNTIL_THE_FIRST_DEATH = Backoff(healthy_s=math.inf, max_early_deaths=1)


@dataclass(frozen=True)
class Configuration:
    """A prefill/decode pair over one transport, or, without a transport, one colocated worker."""

    transport: str | None

    @property
    def name(self) -> str:
        return "colocated" if self.transport is None else f"pair_{self.transport}"

    @property
    def is_pair(self) -> bool:
        return self.transport is not None


def handing_over(config: ServeConfig) -> ServeConfig:
    """The same, for benches of the handoff: every prompt goes through one."""
    router = config.router.model_copy(update={"disaggregation": "always"})
    return config.model_copy(update={"router": router})


def plan_for(configuration: Configuration, config: ServeConfig, num_cores: int) -> Plan:
    """One worker of each role of the pair, or one colocated worker with the decode worker's settings and the threads
    of both. Raises: ConfigError."""
    pair = make_plan(quiet(config), Overrides({Role.PREFILL: 1, Role.DECODE: 1, Role.COLOCATED: 0}), num_cores).config
    if configuration.is_pair:
        transfer = pair.transfer.model_copy(update={"transport": configuration.transport})
        return with_free_ports(Plan(pair.model_copy(update={"transfer": transfer})))
    num_threads = (pair.prefill.num_threads or 1) + (pair.decode.num_threads or 1)
    colocated = pair.decode.model_copy(update={"num_threads": num_threads})
    replicas = {Role.PREFILL: 0, Role.DECODE: 0, Role.COLOCATED: 1}
    return with_free_ports(make_plan(pair.model_copy(update={"colocated": colocated}), Overrides(replicas), num_cores))


async def run_system(plan: Plan, log_folder: Path, work: Callable[[Plan], Coroutine[Any, Any, T]]) -> T:
    """Start every member, do `work` with the plan that names their secret, stop every member, whatever happens.

    Raises: ConfigError or MemberGivenUp, with its last words, when a member dies; whatever `work` raises.
    """
    with with_secret(plan, log_folder) as plan:
        return await _run_members(plan, log_folder, work(plan))


async def _run_members(plan: Plan, log_folder: Path, work: Coroutine[Any, Any, T]) -> T:
    config_path = log_folder / "serve.yaml"
    plan.write(config_path)

    def command(spec: MemberSpec) -> list[str]:
        return python_command(spec, config_path, plan.control_addresses)

    supervisor = Supervisor(ProcessHost(command, log_folder), _ignore, UNTIL_THE_FIRST_DEATH)
    supervising, working = asyncio.create_task(supervisor.run(plan.specs)), asyncio.create_task(work)
    try:
        await asyncio.wait({supervising, working}, return_when=asyncio.FIRST_COMPLETED)
        if supervising.done():
            supervising.result()
        return await working
    finally:
        for task in (working, supervising):  # the work first: it calls the members
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def until_ready(plan: Plan, timeout_s: float) -> list[pb.WorkerHello]:
    """The workers, once they can serve. Raises: TimeoutError."""
    following = follow_status(plan.control_address, plan.config.security.cluster_access(), POLL_S)
    async with asyncio.timeout(timeout_s), aclosing(following) as statuses:
        async for status in statuses:
            if status.is_ready:
                return [worker.hello for worker in status.workers]
    raise AssertionError("follow_status ended")


def quiet(config: ServeConfig) -> ServeConfig:
    """On ports that disturb nothing else that serves here."""
    free = {"host": LOOPBACK, "http_port": 0, "grpc_port": 0, "control_port": 0}
    return config.model_copy(update={"router": config.router.model_copy(update=free)})


def _ignore(_event: MemberEvent) -> None:
    """A death ends the run, and says so itself."""
