"""An engine seen from asyncio: commands are awaited, and each sequence's events are a stream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

from common.block_hash import BlockHash
from common.kv_layout import KVLayout
from engine.block_manager import CacheEvents
from engine.engine import Engine, EngineLimits, EngineLoad, OnLayerComputed, StepObserver
from engine.loop import EngineLoop, EngineStopped
from engine.sequence import SampledToken, ScheduledSequence, Sequence

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Started:
    """The sequence's first step since it was watched is about to run."""

    num_cached_tokens: int  # prefix-cache hits: tokens that no step computes for it


class AsyncEngine:
    """Owns the engine's thread. All methods are called on the event loop that it was made on.

    `tap` sees every step too, on the engine's thread, before the streams do.
    """

    def __init__(self, engine: Engine, tap: StepObserver | None = None) -> None:
        self.layout: KVLayout = engine.layout
        self.limits: EngineLimits = engine.limits
        self.device: torch.device = engine.device
        self._engine = engine
        self._event_loop = asyncio.get_running_loop()
        self._streams: dict[Sequence, asyncio.Queue[Started | SampledToken]] = {}
        self._crashed: asyncio.Future[BaseException] = self._event_loop.create_future()
        self._loop = EngineLoop(engine, _Bridge(self._post_events, tap), self._post_crash)
        self._loop.start()

    async def call(self, command: Callable[[Engine], T]) -> T:
        """Run `command` on the engine's thread, between two steps."""
        return await asyncio.wrap_future(self._loop.submit(command))

    def post(self, command: Callable[[Engine], object], then: Callable[[], None] | None = None) -> None:
        """Like `call`, without waiting. Order among posts and calls is kept; an error is logged.

        `then` is called afterwards on any thread, even when the engine has failed or stopped.
        """
        future = self._loop.submit(command)
        future.add_done_callback(_log_error)
        if then is not None:
            future.add_done_callback(lambda _: then())

    def wake(self) -> None:
        """A sequence that was held back may go on."""
        self.post(lambda engine: None)

    @asynccontextmanager
    async def hosting(self, sequence: Sequence) -> AsyncIterator[AsyncIterator[Started | SampledToken]]:
        """What happens to a sequence, from its first step until it finishes, as a stream.

        The caller puts the sequence into the engine inside the block. Leaving the block, for whatever reason, removes
        it from the engine and frees its KV blocks before the engine's next step.
        """
        queue: asyncio.Queue[Started | SampledToken] = asyncio.Queue()
        self._streams[sequence] = queue
        try:
            yield _events(queue)
        finally:
            del self._streams[sequence]
            self.post(lambda engine: engine.remove(sequence))

    async def load(self) -> EngineLoad:
        return await self.call(lambda engine: engine.load())

    async def cache_events(self) -> CacheEvents:
        """What the prefix cache gained and lost since the last call of either of these two."""
        return await self.call(lambda engine: engine.drain_cache_events())

    async def cache_snapshot(self) -> tuple[CacheEvents, list[BlockHash]]:
        """The same, and all that it holds, both as of one moment."""
        return await self.call(lambda engine: (engine.drain_cache_events(), engine.cached_hashes()))

    def counters(self) -> dict[str, int]:
        return self._engine.counters()

    async def wait_crashed(self) -> BaseException:
        return await asyncio.shield(self._crashed)

    async def stop(self) -> None:
        await self._event_loop.run_in_executor(None, self._loop.stop)

    def _post_events(self, events: list[tuple[Sequence, Started | SampledToken]]) -> None:
        self._event_loop.call_soon_threadsafe(self._deliver, events)

    def _deliver(self, events: list[tuple[Sequence, Started | SampledToken]]) -> None:
        for sequence, event in events:
            if sequence in self._streams:
                self._streams[sequence].put_nowait(event)

    def _post_crash(self, error: BaseException) -> None:
        def note_crash() -> None:
            if not self._crashed.done():
                self._crashed.set_result(error)

        self._event_loop.call_soon_threadsafe(note_crash)


class _Bridge:
    """The engine thread's side: one wake-up of the event loop per kind of event and step, not one per token."""

    def __init__(
        self, post: Callable[[list[tuple[Sequence, Started | SampledToken]]], None], tap: StepObserver | None
    ) -> None:
        self._post = post
        self._tap = tap
        self._started: set[Sequence] = set()

    def on_scheduled(self, scheduled: Seq[ScheduledSequence]) -> OnLayerComputed | None:
        on_layer_computed = None if self._tap is None else self._tap.on_scheduled(scheduled)
        now = {part.sequence for part in scheduled}
        fresh = [part for part in scheduled if part.sequence not in self._started]
        self._started = now | {sequence for sequence in self._started if sequence.block_table}
        if fresh:
            self._post([(part.sequence, Started(part.start)) for part in fresh])
        return on_layer_computed

    def on_sampled(self, sampled: Seq[SampledToken]) -> None:
        if self._tap is not None:
            self._tap.on_sampled(sampled)
        if sampled:
            self._post([(event.sequence, event) for event in sampled])


async def _events(queue: asyncio.Queue[Started | SampledToken]) -> AsyncIterator[Started | SampledToken]:
    has_started = False
    while True:
        event = await queue.get()
        if isinstance(event, SampledToken) or not has_started:  # a sequence starts again after a preemption
            yield event
        has_started = True
        if isinstance(event, SampledToken) and event.finish_reason is not None:
            return


def _log_error(future: Future[object]) -> None:
    error = None if future.cancelled() else future.exception()
    if error is not None and not isinstance(error, EngineStopped):
        logger.error("a posted engine command failed", exc_info=error)
