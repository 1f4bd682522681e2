"""Who serves, by the routers' own accounts: one open channel to each router's control port."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass

from cluster.registry_client import follow_status
from common.cluster_access import ClusterAccess
from common.pb import serving_pb2 as pb

POLL_S = 0.1


@dataclass(frozen=True)
class Sighting:
    """The last time that a member was known to serve."""

    life: str  # another one after each restart
    heard_s: float


@dataclass(frozen=True)
class View:
    """What one router said last."""

    status: pb.ClusterStatus
    life: int  # of the router: how often its uptime has begun again
    heard_s: float


@dataclass(frozen=True)
class Leftover:
    """What a worker or router still holds when nobody asks for anything any more."""

    name: str
    blocks: int  # neither free nor cached
    requests: int  # sequences on a worker, requests queued or active in a router, and those it counts as sent there


class Watch:
    def __init__(self, control_addresses: Mapping[str, str], access: ClusterAccess) -> None:
        """control_addresses: by the router's member name."""
        self._addresses = control_addresses
        self._access = access
        self._views: dict[str, View] = {}
        self._sightings: dict[str, Sighting] = {}
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """For ever."""
        await asyncio.gather(*(self._follow(name, address) for name, address in self._addresses.items()))

    def life(self, name: str) -> str | None:
        """None before the member has served for the first time."""
        sighting = self._sightings.get(name)
        return None if sighting is None else sighting.life

    async def served(self, name: str, other_than: str | None, after_s: float, timeout_s: float) -> float | None:
        """When the member served in another life than this one, heard of after `after_s`; None: not in time."""

        def is_back() -> bool:
            sighting = self._sightings.get(name)
            return sighting is not None and sighting.life != other_than and sighting.heard_s > after_s

        return time.monotonic() if await self._until(is_back, timeout_s) else None

    async def is_whole(self, num_workers: int, timeout_s: float) -> bool:
        """Whether in that time every router has all workers and has found every pair good."""

        def all_good() -> bool:
            statuses = [view.status for view in self._views.values()]
            return len(statuses) == len(self._addresses) and all(
                len(status.workers) == num_workers and all(pair.standing == pb.PAIR_GOOD for pair in status.pairs)
                for status in statuses
            )

        return await self._until(all_good, timeout_s)

    async def leftovers(self, timeout_s: float) -> list[Leftover]:
        """What has not been given back after so long; nothing, as soon as nothing is left."""
        since_s = time.monotonic()

        def is_clean() -> bool:
            is_fresh = all(view.heard_s > since_s + 1.0 for view in self._views.values())  # a few heartbeats
            return is_fresh and not self._leftovers()

        await self._until(is_clean, timeout_s)
        return self._leftovers()

    def model(self) -> str:
        return next(iter(self._views.values())).status.model

    def _leftovers(self) -> list[Leftover]:
        found: dict[str, Leftover] = {}
        for router, view in self._views.items():
            found[router] = Leftover(router, 0, view.status.num_queued + view.status.num_active)
            for worker in view.status.workers:
                name, load = worker.hello.worker_id, worker.load
                requests = load.num_waiting + load.num_running + load.num_reserved + worker.num_assigned
                found[name] = Leftover(name, load.total_blocks - load.free_blocks, requests)
        return [leftover for leftover in found.values() if leftover.blocks or leftover.requests]

    async def _follow(self, router: str, address: str) -> None:
        async with aclosing(follow_status(address, self._access, POLL_S)) as statuses:
            async for status in statuses:
                before = self._views.get(router)
                has_begun_again = before is not None and status.uptime_s < before.status.uptime_s
                life = 0 if before is None else before.life + has_begun_again
                self._views[router] = View(status, life, time.monotonic())
                self._sight(router, self._views[router])
                self._changed.set()

    def _sight(self, router: str, view: View) -> None:
        if view.status.is_ready:
            self._sightings[router] = Sighting(str(view.life), view.heard_s)
        paired = {
            name
            for pair in view.status.pairs
            if pair.standing == pb.PAIR_GOOD
            for name in (pair.prefill_worker, pair.decode_worker)
        }
        for worker in view.status.workers:
            if worker.hello.worker_id in paired:
                heard_s = view.heard_s - worker.heartbeat_age_s
                self._sightings[worker.hello.worker_id] = Sighting(worker.hello.incarnation, heard_s)

    async def _until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Whether it came true in time; asked again whenever a router has said something."""
        end_s = time.monotonic() + timeout_s
        while not condition():
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), end_s - time.monotonic())
            except TimeoutError:
                return condition()
        return True
