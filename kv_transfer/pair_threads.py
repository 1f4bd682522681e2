"""The threads that a link's pair lives on, so that the event loop never waits for it.

posting     make the pair, then post what is to move, as soon as it is known
finishing   wait for each, in the same order, and look at what came; meanwhile the next ones are moving
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from common.errors import PeerLost
from kv_transfer.torch_pair import Moving, Pair

Result = TypeVar("Result")


class PairThreads:
    """Used from one event loop."""

    def __init__(self, timeout_s: float) -> None:
        """timeout_s: for one payload, once those before it are done."""
        self._timeout_s = timeout_s
        self._posting = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-pair-post")
        self._finishing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-pair-finish")
        self._pair: Pair | None = None
        self._is_closed = False

    async def make(self, new_pair: Callable[[], Pair], prove: Callable[[Pair], None]) -> None:
        """Raises: PeerLost also for an address that is none."""

        def make_now() -> None:
            with pair_errors():
                self._pair = new_pair()  # already here, so that `close` ends what comes next
                prove(self._pair)

        with pair_errors():
            made = self._posting.submit(make_now)
        await asyncio.wrap_future(made)

    def move(self, post: Callable[[Pair], Moving], when_done: Callable[[], Result]) -> asyncio.Future[Result]:
        """Post now, whatever is still moving. The result is when_done's, called on a thread. It raises: PeerLost."""
        outcome: Future[Result] = Future()
        outcome.set_running_or_notify_cancel()  # a payload under way cannot be called back
        try:
            with pair_errors():
                self._posting.submit(self._post, post, when_done, outcome)
        except PeerLost as closed:
            outcome.set_exception(closed)
        moved = asyncio.wrap_future(outcome)
        moved.add_done_callback(retrieve)
        return moved

    def close(self) -> None:
        """Wake whoever waits in the pair, and let go of it once all that was posted has ended. Safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._pair is not None:
            self._pair.abort()
        self._posting.submit(self._end)
        self._posting.shutdown(wait=False)

    def _post(self, post: Callable[[Pair], Moving], when_done: Callable[[], Result], outcome: Future[Result]) -> None:
        assert self._pair is not None, "make comes first"
        try:
            with pair_errors():
                moving = post(self._pair)
        except PeerLost as lost:
            outcome.set_exception(lost)
            return
        self._finishing.submit(self._finish, moving, when_done, outcome)

    def _finish(self, moving: Moving, when_done: Callable[[], Result], outcome: Future[Result]) -> None:
        try:
            with pair_errors():
                moving.finish(self._timeout_s)
            outcome.set_result(when_done())
        except BaseException as error:
            outcome.set_exception(error)

    def _end(self) -> None:
        self._finishing.submit(self._let_go)
        self._finishing.shutdown(wait=False)

    def _let_go(self) -> None:
        if self._pair is not None:
            self._pair.abort()  # one that was made while it was being closed
            self._pair.let_go()
        self._pair = None


def retrieve(future: asyncio.Future[Result]) -> None:
    """Whoever would have looked at its error may have gone."""
    if not future.cancelled():
        future.exception()


@contextmanager
def pair_errors() -> Iterator[None]:
    """torch.distributed calls nearly everything a RuntimeError, and allocates what a peer asks for."""
    try:
        yield
    except (RuntimeError, OSError, ValueError, MemoryError) as error:
        raise PeerLost(f"the torch.distributed pair failed: {error}") from error
