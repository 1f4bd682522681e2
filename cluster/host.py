"""The seam between the supervisor and what runs router and workers: local processes or Ray actors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Protocol

from common.config import Role


@dataclass(frozen=True)
class MemberSpec:
    """One thing to keep alive. Its name is stable over restarts; its incarnation is not."""

    name: str  # "router", "router-1", "prefill-0", "decode-1"
    role: Role | None  # None: a router
    admin_ports: AdminPorts | None = None  # a router's, where there are several
    num_threads: int | None = None  # a worker's, in place of its pool's


@dataclass(frozen=True)
class AdminPorts:
    control: int
    metrics: int  # used once the HTTP port has no metrics: RouterSection.has_metrics_port


@dataclass(frozen=True)
class Ending:
    """Why a member is no longer there."""

    reason: str  # "exit code 1", "killed by SIGKILL", "actor died"
    last_words: str = ""  # the end of what it said, for the person at the terminal
    is_config_error: bool = False  # starting it again cannot help
    has_left: bool = False  # it was asked to go, and went in order


class Member(Protocol):
    """One running life of a member, from start to end; a restart gives another one."""

    @property
    def obstacle(self) -> str:
        """Why it does not run yet, in words that follow its name; empty once a process of it runs."""

    async def ended(self) -> Ending:
        """Wait for the end, however it comes. May be awaited again, also after the end."""

    async def stop(self) -> None:
        """Ask it to stop, insist after a bound, and return when it is gone. Safe to call after its end."""


class Patience:
    """How long members that are stopped may take for what they still answer. One for all members of a host."""

    def __init__(self) -> None:
        self._is_over = asyncio.Event()

    @property
    def is_over(self) -> bool:
        return self._is_over.is_set()

    def end(self) -> None:
        """For all of them, now and later."""
        self._is_over.set()

    async def wait(self, end: Awaitable[object], bound_s: float) -> None:
        """Returns when a member's `end` has come, whatever it is, the bound has passed, or patience is over."""
        await first_of(end, self._is_over.wait(), within_s=bound_s)


async def first_of(*awaitables: Awaitable[object], within_s: float | None = None) -> None:
    """Returns when one of them is done or the time has passed; what is not done is cancelled."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        await asyncio.wait(tasks, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class WorkerHost(Protocol):
    """Starts members. Whether and when to start one again is the supervisor's decision, for every host alike."""

    async def start(self, spec: MemberSpec) -> Member:
        """Begin a life. Returns before it is ready to serve: the router's registry tells that.

        Raises: HostError when nothing could be started at all.
        """

    def hurry(self) -> None:
        """Members that stop, now or later, do not wait for what they still answer: it ends with a typed error."""

    async def close(self) -> None:
        """Release what the host itself holds. Members are stopped before."""


class HostError(Exception):
    """A member could not be started; trying again later may help."""
