"""One life of a member as a Ray actor: where it was placed, what it says, how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster.host import Ending, Patience
from cluster.processes import last_words
from cluster.ray_actor import LEFT, Place
from cluster.ray_placement import Needs, shortage
from common.errors import ConfigError

END_S = 10.0  # of an actor, once it was killed
CALL_S = 5.0  # to one that lives
LOOK_S = 1.0  # between two looks at its placement, or at its log


@dataclass(frozen=True)
class MemberTerms:
    needs: Needs
    log_path: Path  # here, whatever node it runs on
    stop_timeout_s: float
    patience: Patience


class RayMember:
    def __init__(self, ray: Any, actor: Any, terms: MemberTerms) -> None:
        self._ray = ray
        self._actor = actor
        self._terms = terms
        self._log_start = terms.log_path.stat().st_size if terms.log_path.exists() else 0
        self._life = asyncio.ensure_future(_until_end(ray, actor.serve.remote()))
        self._placed: asyncio.Future[Place] = asyncio.ensure_future(_result(actor.place.remote()))
        self._log = _FarLog(actor, terms.log_path)
        self._obstacle = ""
        self._looking = asyncio.create_task(self._look_after())

    @property
    def obstacle(self) -> str:
        return self._obstacle

    async def ended(self) -> Ending:
        ending = await asyncio.shield(self._life)
        await self._fetch_log()
        said = ending.last_words or last_words(self._terms.log_path, self._log_start)
        return replace(ending, last_words=said)

    async def stop(self) -> None:
        errors = self._ray.exceptions
        if self._is_placed:
            patience = self._terms.patience
            await patience.wait(_result(self._actor.stop.remote()), self._terms.stop_timeout_s)
            if patience.is_over:
                with suppress(TimeoutError, errors.RayActorError, errors.RayTaskError):
                    await asyncio.wait_for(_result(self._actor.stop_at_once.remote()), END_S)
            await self._fetch_log()
        self._ray.kill(self._actor, no_restart=True)
        await asyncio.wait({self._life}, timeout=END_S)
        tasks = (self._life, self._placed, self._looking)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def _is_placed(self) -> bool:
        return self._placed.done() and not self._placed.cancelled() and self._placed.exception() is None

    async def _look_after(self) -> None:
        while not self._placed.done():
            await asyncio.wait({self._placed}, timeout=LOOK_S)
            if not self._placed.done():
                self._obstacle = await asyncio.to_thread(shortage, self._ray, self._terms.needs)
        self._obstacle = ""
        while not self._life.done():
            await self._fetch_log()
            await asyncio.wait({self._life}, timeout=LOOK_S)

    async def _fetch_log(self) -> None:
        """What it has printed since, if that is not in its file here anyway."""
        if not self._is_placed or (place := self._placed.result()).log_path is None:
            return
        try:
            await self._log.fetch()
        except TimeoutError:  # it is busy, or its node has gone: its life will tell
            return
        except self._ray.exceptions.RayActorError:
            self._log.note(f"its last words may be in {place.log_path} on {place.node}")


class _FarLog:
    """Copies a log of another node to a file here."""

    def __init__(self, actor: Any, path: Path) -> None:
        self._actor = actor
        self._path = path
        self._num_copied = 0
        self._lock = asyncio.Lock()
        self._notes: set[str] = set()

    async def fetch(self) -> None:
        """Raises: TimeoutError, RayActorError once it is dead."""
        async with self._lock:
            while text := await asyncio.wait_for(_result(self._actor.read_log.remote(self._num_copied)), CALL_S):
                with self._path.open("ab") as log:
                    log.write(text)
                self._num_copied += len(text)

    def note(self, text: str) -> None:
        """Once."""
        if text not in self._notes:
            self._notes.add(text)
            with self._path.open("a") as log:
                log.write(f"{text}\n")


async def _until_end(ray: Any, serving: Awaitable[str]) -> Ending:
    try:
        reason = await serving
        return Ending(reason, has_left=reason == LEFT)
    except ray.exceptions.RayActorError as error:
        last_line = str(error).strip().splitlines()[-1].strip()
        return Ending(last_line.partition(". ")[0])  # the rest is a page of guesses
    except ray.exceptions.RayTaskError as error:
        return Ending(f"raised {type(error.cause).__name__}", str(error.cause), isinstance(error.cause, ConfigError))


async def _result(reference: Any) -> Any:
    return await reference
