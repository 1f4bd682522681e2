"""Keeps the members of a deployment alive: start, notice the end, wait a little longer each time, start again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from cluster.host import Ending, HostError, MemberSpec, WorkerHost
from common.errors import ConfigError


@dataclass(frozen=True)
class Backoff:
    """Seconds to wait before the next start: doubling from `first_s` up to `longest_s`.

    A life of `healthy_s` or longer forgives every earlier death. A member that has never lived that long is given up
    after `max_early_deaths` in a row: at start, somebody is watching and wants to hear.
    """

    first_s: float = 0.5
    longest_s: float = 10.0
    healthy_s: float = 60.0
    max_early_deaths: int = 5

    def delay_s(self, num_deaths_in_a_row: int) -> float:
        return min(self.longest_s, self.first_s * 2.0 ** (num_deaths_in_a_row - 1))


@dataclass(frozen=True)
class MemberStarting:
    spec: MemberSpec


@dataclass(frozen=True)
class MemberDied:
    spec: MemberSpec
    ending: Ending
    restart_in_s: float


@dataclass(frozen=True)
class MemberLeft:
    """A worker that was drained. It is not started again: whoever drained it had a reason."""

    spec: MemberSpec


MemberEvent = MemberStarting | MemberDied | MemberLeft


class MemberGivenUp(Exception):
    """A member dies at every start. The message holds its last words."""


@dataclass(frozen=True)
class Clock:
    """Time, so that tests need not wait for it."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep


class Supervisor:
    """Owns the lives of all members. `run` lasts until it is cancelled; no member outlives it.

    Routers are stopped first: what they still answer needs the workers.
    """

    def __init__(
        self,
        host: WorkerHost,
        on_event: Callable[[MemberEvent], None],
        backoff: Backoff = Backoff(),
        clock: Clock = Clock(),
    ) -> None:
        self._host = host
        self._on_event = on_event
        self._backoff = backoff
        self._clock = clock

    async def run(self, specs: Sequence[MemberSpec]) -> None:
        """Raises: ConfigError or MemberGivenUp with the message of the member that cannot be started; the others
        are stopped first."""
        try:
            async with asyncio.TaskGroup() as workers, asyncio.TaskGroup() as routers:
                for spec in specs:
                    group = routers if spec.role is None else workers
                    group.create_task(self._keep_alive(spec), name=spec.name)
        except ExceptionGroup as failures:
            hopeless = failures.split((ConfigError, MemberGivenUp))[0]
            raise failures if hopeless is None else _first(hopeless) from None

    async def _keep_alive(self, spec: MemberSpec) -> None:
        num_deaths, was_healthy = 0, False
        while True:
            self._on_event(MemberStarting(spec))
            started_s = self._clock.now()
            ending = await self._live_once(spec)
            if ending.has_left and spec.role is not None:
                self._on_event(MemberLeft(spec))
                return
            if self._clock.now() - started_s >= self._backoff.healthy_s:
                num_deaths, was_healthy = 0, True
            num_deaths += 1
            if not was_healthy:
                self._require_hope(spec, ending, num_deaths)
            delay_s = self._backoff.delay_s(num_deaths)
            self._on_event(MemberDied(spec, ending, delay_s))
            await self._clock.sleep(delay_s)

    def _require_hope(self, spec: MemberSpec, ending: Ending, num_deaths: int) -> None:
        if ending.is_config_error:
            raise ConfigError(_last_line(ending))
        if num_deaths >= self._backoff.max_early_deaths:
            raise MemberGivenUp(f"{spec.name} died {num_deaths} times in a row ({ending.reason}): {_last_line(ending)}")

    async def _live_once(self, spec: MemberSpec) -> Ending:
        try:
            member = await self._host.start(spec)
        except HostError as error:
            return Ending(str(error))
        try:
            return await member.ended()
        finally:
            await member.stop()


def _first(failures: BaseExceptionGroup[Exception]) -> Exception:
    """Of groups within groups."""
    first = failures.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


def _last_line(ending: Ending) -> str:
    return ending.last_words.splitlines()[-1] if ending.last_words else ending.reason
