"""The deployment under test: the processes that `pdserve up` would start, under its supervisor, on free ports."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from cluster.host import Ending, Member, MemberSpec
from cluster.plan import LOOPBACK, Overrides, Plan, available_cores, make_plan, with_free_ports
from cluster.processes import ProcessHost, python_command
from cluster.run_secret import with_secret
from cluster.supervisor import Backoff, MemberEvent, Supervisor
from cluster.up import STOP_MARGIN_S
from common.config import PoolSection, Role, ServeConfig

T = TypeVar("T")

KV_CACHE_GIB = 0.25  # of a worker whose config names none: small enough that prompts compete for it
NEVER_GIVEN_UP = replace(Backoff(), max_early_deaths=10**9)  # most deaths are our own doing


@dataclass(frozen=True)
class Size:
    prefill: int
    decode: int
    routers: int = 1
    transport: str | None = None  # None: as configured


def plan_for(size: Size, config: ServeConfig) -> Plan:
    """float32, so that answers are the same whoever computes them, and with whom. Raises: ConfigError."""
    replicas = {Role.PREFILL: size.prefill, Role.DECODE: size.decode, Role.COLOCATED: 0}
    plan = make_plan(config, Overrides(replicas, router_processes=size.routers), available_cores()).config
    free = {"host": LOOPBACK, "http_port": 0, "grpc_port": 0, "control_port": 0, "metrics_port": 0}
    transport = {"transport": size.transport} if size.transport else {}
    sections = {
        "model": plan.model.model_copy(update={"dtype": "float32", "quantization": "none"}),
        "router": plan.router.model_copy(update=free),
        "transfer": plan.transfer.model_copy(update=transport),
        "prefill": _small(plan.prefill),
        "decode": _small(plan.decode),
    }
    return with_free_ports(Plan(plan.model_copy(update=sections)))


def _small(pool: PoolSection) -> PoolSection:
    return pool if pool.kv_cache_gib else pool.model_copy(update={"kv_cache_gib": KV_CACHE_GIB})


class Processes:
    """A WorkerHost whose members can be signalled by name. Through pidfds: a pid that is reused is never hit."""

    def __init__(self, host: ProcessHost) -> None:
        self._host = host
        self._handles: dict[str, int] = {}

    async def start(self, spec: MemberSpec) -> Member:
        return _Returning(await self._begin(spec), partial(self._begin, spec))

    def hurry(self) -> None:
        self._host.hurry()

    def signal(self, name: str, number: signal.Signals) -> bool:
        """Whether there was a process to take it."""
        try:
            signal.pidfd_send_signal(self._handles[name], number)
        except (KeyError, ProcessLookupError):
            return False
        return True

    async def close(self) -> None:
        for name in list(self._handles):
            self._forget(name)
        await self._host.close()

    async def _begin(self, spec: MemberSpec) -> Member:
        member = await self._host.start(spec)
        self._forget(spec.name)
        with suppress(ProcessLookupError):  # gone already, as its end will tell
            self._handles[spec.name] = os.pidfd_open(member.pid)
        return member

    def _forget(self, name: str) -> None:
        if name in self._handles:
            os.close(self._handles.pop(name))


class _Returning:
    """A member that went in order, because it was asked to, begins again at once: whoever asked wants it back."""

    def __init__(self, member: Member, begin: Callable[[], Awaitable[Member]]) -> None:
        self._member = member
        self._begin = begin

    @property
    def obstacle(self) -> str:
        return self._member.obstacle

    async def ended(self) -> Ending:
        while (ending := await self._member.ended()).has_left:
            self._member = await self._begin()
        return ending

    async def stop(self) -> None:
        await self._member.stop()


async def run_system(
    plan: Plan,
    logs: Path,
    on_event: Callable[[MemberEvent], None],
    work: Callable[[Plan, Processes], Coroutine[Any, Any, T]],
) -> T:
    """Start every member, do `work`, stop every member, whatever happens. One that dies is started again.

    Raises: ConfigError when a member says that it is configured wrongly; whatever `work` raises.
    """
    with with_secret(plan, logs) as plan:
        config_path = logs / "serve.yaml"
        plan.write(config_path)

        def command(spec: MemberSpec) -> list[str]:
            return python_command(spec, config_path, plan.control_addresses)

        processes = Processes(ProcessHost(command, logs, plan.longest_drain_s + STOP_MARGIN_S))
        supervisor = Supervisor(processes, on_event, NEVER_GIVEN_UP)
        supervising = asyncio.create_task(supervisor.run(plan.specs))
        working = asyncio.create_task(work(plan, processes))
        try:
            await asyncio.wait({supervising, working}, return_when=asyncio.FIRST_COMPLETED)
            if supervising.done():
                supervising.result()
            return await working
        finally:
            for task in (working, supervising):  # the work first: it calls the members
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            await processes.close()


@dataclass(frozen=True)
class Death:
    """The end of a life that no fault of ours explains."""

    name: str
    ending: Ending
