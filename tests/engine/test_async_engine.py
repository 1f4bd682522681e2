from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence as Seq
from pathlib import Path

import pytest

from common.engine_config import EngineConfig
from common.sampling import FinishReason, SamplingParams
from engine.async_engine import AsyncEngine, Started
from engine.build import build_engine
from engine.engine import Engine, OnLayerComputed
from engine.loop import EngineStopped
from engine.sequence import SampledToken, ScheduledSequence, Sequence


class Exploding:
    """A tap that fails in the middle of a step, as a broken kernel would."""

    def on_scheduled(self, scheduled: Seq[ScheduledSequence]) -> OnLayerComputed:
        return self._explode

    def _explode(self, layer: int) -> None:
        raise RuntimeError("injected")

    def on_sampled(self, sampled: Seq[SampledToken]) -> None: ...


@pytest.fixture
def engine(tiny_model: Path) -> Engine:
    return build_engine(EngineConfig(tiny_model, dtype="float32", num_threads=1, kv_cache_bytes=1 << 20))


def sequence(max_tokens: int = 5) -> Sequence:
    return Sequence([1, 2, 3], SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True))


async def test_a_sequences_events_are_its_start_and_its_tokens(engine: Engine) -> None:
    running = AsyncEngine(engine)
    mine = sequence()
    async with running.hosting(mine) as events:
        running.post(lambda engine: engine.add(mine))
        seen = [event async for event in events]
    assert isinstance(seen[0], Started)
    tokens = [event for event in seen if isinstance(event, SampledToken)]
    assert [token.finish_reason for token in tokens] == [None] * 4 + [FinishReason.LENGTH]
    await running.stop()


async def test_leaving_early_frees_the_blocks_before_the_next_command(engine: Engine) -> None:
    running = AsyncEngine(engine)
    mine = sequence(max_tokens=4000)
    async with running.hosting(mine) as events:
        running.post(lambda engine: engine.add(mine))
        async for event in events:
            if isinstance(event, SampledToken):
                break
    load = await running.load()
    assert load.free_blocks == load.total_blocks
    assert load.num_running == 0
    await running.stop()


async def test_a_failing_step_crashes_the_engine_once_and_every_later_command_says_so(engine: Engine) -> None:
    running = AsyncEngine(engine, tap=Exploding())
    mine = sequence()
    async with running.hosting(mine):
        running.post(lambda engine: engine.add(mine))
        error = await asyncio.wait_for(running.wait_crashed(), 10)
    assert str(error) == "injected"
    with pytest.raises(RuntimeError, match="injected"):
        await running.load()
    await running.stop()


async def test_a_failing_command_harms_only_its_caller(engine: Engine) -> None:
    running = AsyncEngine(engine)

    def fail(engine: Engine) -> None:
        raise ValueError("mine alone")

    with pytest.raises(ValueError, match="mine alone"):
        await running.call(fail)
    assert (await running.load()).num_running == 0
    await running.stop()


async def test_a_command_after_the_end_fails_instead_of_waiting(engine: Engine) -> None:
    running = AsyncEngine(engine)
    await running.stop()
    with pytest.raises(EngineStopped):
        await asyncio.wait_for(running.load(), 5)


async def test_an_engine_whose_blocks_are_all_reserved_sleeps_until_something_changes(engine: Engine) -> None:
    """Waiting work that cannot run must not keep a core busy."""
    running = AsyncEngine(engine)
    load = await running.load()
    held, waiting = Sequence([1] * (load.total_blocks * 16 - 20), sequence().sampling), sequence(max_tokens=40)
    async with running.hosting(waiting) as events:
        async with running.hosting(held):
            await running.call(lambda engine: engine.reserve(held))
            running.post(lambda engine: engine.add(waiting))
            assert (await running.load()).num_waiting == 1
            before_s = time.process_time()
            await asyncio.sleep(0.5)
            assert time.process_time() - before_s < 0.2
        assert len([event async for event in events]) == 41
    await running.stop()
