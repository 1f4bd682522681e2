"""A host whose members do as the test says, and a clock that costs no time."""

from __future__ import annotations

import asyncio

from cluster.host import Ending, HostError, MemberSpec
from cluster.supervisor import Clock


class FakeClock:
    """Sleeping moves it on at once, or once the test lets it."""

    def __init__(self) -> None:
        self.may_wake: asyncio.Event | None = None
        self.now_s = 0.0
        self.naps: list[float] = []

    async def sleep(self, delay_s: float) -> None:
        self.naps.append(delay_s)
        self.now_s += delay_s
        if self.may_wake is not None:
            await self.may_wake.wait()
        await asyncio.sleep(0)

    def clock(self) -> Clock:
        return Clock(lambda: self.now_s, self.sleep)


class ObedientMember:
    def __init__(self) -> None:
        self.is_stopped = False
        self.stopping = asyncio.Event()
        self.may_stop: asyncio.Event | None = None
        self.end: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()

    @property
    def obstacle(self) -> str:
        return ""

    async def ended(self) -> Ending:
        return await asyncio.shield(self.end)

    async def stop(self) -> None:
        self.stopping.set()
        if self.may_stop is not None:
            await self.may_stop.wait()
        self.is_stopped = True


class ObedientHost:
    """Starts members that live until the test ends them."""

    def __init__(self) -> None:
        self.lives: dict[str, list[ObedientMember]] = {}
        self.num_refusals = 0
        self._changed = asyncio.Event()

    async def start(self, spec: MemberSpec) -> ObedientMember:
        if self.num_refusals:
            self.num_refusals -= 1
            raise HostError("no room")
        member = ObedientMember()
        self.lives.setdefault(spec.name, []).append(member)
        self._changed.set()
        return member

    def hurry(self) -> None:
        return

    async def close(self) -> None:
        return

    async def life(self, name: str, number: int) -> ObedientMember:
        async with asyncio.timeout(5):
            while len(self.lives.get(name, [])) < number:
                self._changed.clear()
                await self._changed.wait()
        return self.lives[name][number - 1]
