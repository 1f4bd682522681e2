"""One prefix cache's changes, told to several listeners: each hears all of them, at its own pace."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol


class CacheEvents(Protocol):
    @property
    def stored(self) -> list[bytes]: ...

    @property
    def evicted(self) -> list[bytes]: ...


class CacheSource(Protocol):
    """engine/async_engine.py in every real worker."""

    async def cache_events(self) -> CacheEvents:
        """What changed since the last call."""

    async def cache_snapshot(self) -> tuple[CacheEvents, list[bytes]]:
        """The same, and all that is cached, both as of one moment."""


@dataclass
class CacheNews:
    stored: list[bytes] = field(default_factory=list)
    evicted: list[bytes] = field(default_factory=list)


class CacheFeed:
    def __init__(self, source: CacheSource) -> None:
        self._source = source
        self._listeners: set[_Listener] = set()  # those that know all up to what is pending for them
        self._lock = asyncio.Lock()  # changes are handed on in the order in which they were drained

    @contextmanager
    def listening(self) -> Iterator[Callable[[], Awaitable[CacheNews]]]:
        """Each call tells what is new to this listener; the first one, all that is cached."""
        listener = _Listener()

        async def news() -> CacheNews:
            return await self._news(listener)

        try:
            yield news
        finally:
            self._listeners.discard(listener)

    async def _news(self, listener: _Listener) -> CacheNews:
        async with self._lock:
            if listener in self._listeners:
                self._hand_on(await self._source.cache_events())
                return listener.take()
            changes, everything = await self._source.cache_snapshot()
            self._hand_on(changes)
            self._listeners.add(listener)
            return CacheNews(stored=everything)

    def _hand_on(self, changes: CacheEvents) -> None:
        for listener in self._listeners:
            listener.note(changes)


class _Listener:
    """Holds at most what its cache has gained and lost: what comes and goes again in between is forgotten."""

    def __init__(self) -> None:
        self._pending: dict[bytes, bool] = {}  # True: stored, False: evicted

    def note(self, changes: CacheEvents) -> None:
        for hashes, is_stored in ((changes.stored, True), (changes.evicted, False)):
            for block_hash in hashes:
                if self._pending.get(block_hash, is_stored) is not is_stored:
                    del self._pending[block_hash]
                else:
                    self._pending[block_hash] = is_stored

    def take(self) -> CacheNews:
        pending, self._pending = self._pending, {}
        return CacheNews(
            [block_hash for block_hash, is_stored in pending.items() if is_stored],
            [block_hash for block_hash, is_stored in pending.items() if not is_stored],
        )
