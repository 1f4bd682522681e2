"""Every listener ends up with what the cache holds, however their reports are mixed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack

from hypothesis import given
from hypothesis import strategies as st

from common.cache_feed import CacheFeed, CacheNews


class Cache:
    """Tells changes once, as the engine does."""

    def __init__(self) -> None:
        self.held: set[bytes] = set()
        self._told: set[bytes] = set()

    async def cache_events(self) -> CacheNews:
        await asyncio.sleep(0)
        news = CacheNews(sorted(self.held - self._told), sorted(self._told - self.held))
        self._told = set(self.held)
        return news

    async def cache_snapshot(self) -> tuple[CacheNews, list[bytes]]:
        return await self.cache_events(), sorted(self.held)


class Router:
    """What one router believes."""

    def __init__(self, stack: ExitStack, feed: CacheFeed) -> None:
        self.news: Callable[[], Awaitable[CacheNews]] = stack.enter_context(feed.listening())
        self.index: set[bytes] = set()

    async def listen(self) -> None:
        news = await self.news()
        assert self.index.isdisjoint(news.stored)
        assert self.index.issuperset(news.evicted)
        self.index = (self.index - set(news.evicted)) | set(news.stored)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("flip"), st.integers(0, 5)),
            st.tuples(st.sampled_from(["listen", "restart"]), st.integers(0, 2)),
            st.tuples(st.just("all listen at once"), st.just(0)),
        ),
        max_size=60,
    )
)
def test_each_of_several_routers_knows_all_whenever_it_listens(history: list[tuple[str, int]]) -> None:
    asyncio.run(_play(history))


async def _play(history: list[tuple[str, int]]) -> None:
    cache = Cache()
    feed = CacheFeed(cache)
    stacks = [ExitStack() for _ in range(3)]
    routers = [Router(stack, feed) for stack in stacks]
    for event, which in history:
        if event == "flip":
            cache.held ^= {bytes([which])}
        elif event == "listen":
            await routers[which].listen()
            assert routers[which].index == cache.held
        elif event == "restart":
            stacks[which].close()
            routers[which] = Router(stacks[which], feed)
        else:
            await asyncio.gather(*(router.listen() for router in routers))
            assert all(router.index == cache.held for router in routers)
    for stack in stacks:
        stack.close()
    assert not feed._listeners
