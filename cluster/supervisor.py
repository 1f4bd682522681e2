"""Keeps the members of a deployment alive: start, notice the end, wait a little longer each time, start again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from cluster.host import Ending, HostError, Member, MemberSpec, WorkerHost, first_of
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


@dataclass(frozen=True)
class MemberDropped:
    """An added worker that could not be started. Nothing depended on it yet."""

    spec: MemberSpec
    reason: str


MemberEvent = MemberStarting | MemberDied | MemberLeft | MemberDropped


class MemberGivenUp(Exception):
    """A member dies at every start. The message holds its last words."""


@dataclass(frozen=True)
class MemberState:
    """A member that is kept alive, or one that is leaving."""

    spec: MemberSpec
    is_leaving: bool
    obstacle: str  # why no process of it runs now, in words that follow its name; empty if one does


@dataclass(frozen=True)
class Clock:
    """Time, so that tests need not wait for it."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep


@dataclass(eq=False)
class _Kept:
    spec: MemberSpec
    is_essential: bool  # the deployment ends with it if it cannot be started
    is_let_go: asyncio.Event = field(default_factory=asyncio.Event)
    life: Member | None = None  # None: between two of them
    obstacle: str = "starts"

    def state(self) -> MemberState:
        obstacle = self.obstacle if self.life is None else self.life.obstacle
        return MemberState(self.spec, self.is_let_go.is_set(), obstacle)


class Supervisor:
    """Owns the lives of all members. `run` lasts until it is cancelled; no member outlives it.

    Workers may be added and let go meanwhile. Routers are stopped first: what they still answer needs the workers.
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
        self._kept: dict[str, _Kept] = {}  # the oldest first
        self._workers: asyncio.TaskGroup | None = None  # while more may be added

    @property
    def is_running(self) -> bool:
        return self._workers is not None

    @property
    def members(self) -> list[MemberState]:
        """The oldest first; none that has left."""
        return [kept.state() for kept in self._kept.values()]

    async def run(self, specs: Sequence[MemberSpec]) -> None:
        """Raises: ConfigError or MemberGivenUp with the message of the member that cannot be started; the others
        are stopped first."""
        try:
            async with asyncio.TaskGroup() as workers, asyncio.TaskGroup() as routers:
                for spec in specs:
                    self._keep(spec, routers if spec.role is None else workers, is_essential=True)
                self._workers = workers
                try:
                    await asyncio.get_running_loop().create_future()  # until it is cancelled, or a member is hopeless
                finally:
                    self._workers = None
        except ExceptionGroup as failures:
            hopeless = failures.split((ConfigError, MemberGivenUp))[0]
            raise failures if hopeless is None else _first(hopeless) from None

    def add(self, spec: MemberSpec) -> None:
        """One more worker, while `run` runs. If it cannot be started it is dropped, and the others go on."""
        assert self._workers is not None
        self._keep(spec, self._workers, is_essential=False)

    def let_go(self, name: str) -> None:
        """It is drained and not started again; until it is gone it is a member."""
        self._kept[name].is_let_go.set()

    def _keep(self, spec: MemberSpec, group: asyncio.TaskGroup, *, is_essential: bool) -> None:
        assert spec.name not in self._kept, f"{spec.name} still lives"
        kept = self._kept[spec.name] = _Kept(spec, is_essential)
        group.create_task(self._keep_alive(kept), name=spec.name)

    async def _keep_alive(self, kept: _Kept) -> None:
        try:
            await self._restart(kept)
            self._on_event(MemberLeft(kept.spec))
        except (ConfigError, MemberGivenUp) as error:
            if kept.is_essential:
                raise
            self._on_event(MemberDropped(kept.spec, str(error)))
        finally:
            del self._kept[kept.spec.name]

    async def _restart(self, kept: _Kept) -> None:
        """Again and again, until it is drained or let go."""
        num_deaths, was_healthy = 0, False
        while not kept.is_let_go.is_set():
            self._on_event(MemberStarting(kept.spec))
            started_s = self._clock.now()
            ending = await self._live_once(kept)
            if kept.is_let_go.is_set() or (ending.has_left and kept.spec.role is not None):
                return
            if self._clock.now() - started_s >= self._backoff.healthy_s:
                num_deaths, was_healthy = 0, True
            num_deaths += 1
            if not was_healthy:
                self._require_hope(kept.spec, ending, num_deaths)
            delay_s = self._backoff.delay_s(num_deaths)
            self._on_event(MemberDied(kept.spec, ending, delay_s))
            kept.obstacle = f"died ({ending.reason}) and starts again within {delay_s:.1f} s"
            await first_of(self._clock.sleep(delay_s), kept.is_let_go.wait())

    def _require_hope(self, spec: MemberSpec, ending: Ending, num_deaths: int) -> None:
        if ending.is_config_error:
            raise ConfigError(_last_line(ending))
        if num_deaths >= self._backoff.max_early_deaths:
            raise MemberGivenUp(f"{spec.name} died {num_deaths} times in a row ({ending.reason}): {_last_line(ending)}")

    async def _live_once(self, kept: _Kept) -> Ending:
        """Until it ends, or is let go and drained."""
        try:
            member = kept.life = await self._host.start(kept.spec)
        except HostError as error:
            return Ending(str(error))
        ended = asyncio.ensure_future(member.ended())
        try:
            await first_of(ended, kept.is_let_go.wait())
            if not kept.is_let_go.is_set():
                return ended.result()
            await member.stop()
            return Ending("let go", has_left=True)
        finally:
            await member.stop()  # also when draining it was cut short
            kept.life = None


def _first(failures: BaseExceptionGroup[Exception]) -> Exception:
    """Of groups within groups."""
    first = failures.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


def _last_line(ending: Ending) -> str:
    return ending.last_words.splitlines()[-1] if ending.last_words else ending.reason
