"""The line in front of the workers: retries first, then fair shares, and no longer than its bounds."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

from common.errors import QueueFull
from router.fair_queue import FairQueue
from router.priority_lanes import Queued

T = TypeVar("T", bound=Queued)


@dataclass(frozen=True)
class QueueBounds:
    """Retries do not count: they have had their turn."""

    max_requests: int
    max_tokens: int  # of their prompts, less what is cached; a longer prompt waits only in an empty line


class WaitingLine(Generic[T]):
    def __init__(self, bounds: QueueBounds) -> None:
        self._bounds = bounds
        self._retries: OrderedDict[T, None] = OrderedDict()
        self._fair: FairQueue[T] = FairQueue()

    def __len__(self) -> int:
        return len(self._retries) + len(self._fair)

    def push(self, entry: T) -> list[T]:
        """Returns who must leave for it: of a full line, the newest of whoever fills it, if this tenant has far less.

        Without that, one tenant's burst would lock the others out for as long as the line is full.
        Raises: QueueFull.
        """
        pushed_out = [] if self._has_room(entry) else self._make_room(entry)
        self._fair.push(entry)
        return pushed_out

    def require_room(self, tenant: str) -> None:
        """Raises: QueueFull when it would be raised for the shortest prompt of this tenant."""
        if len(self._fair) >= self._bounds.max_requests:
            self._require_less(tenant, cost=1)

    def push_retry(self, entry: T) -> None:
        self._retries[entry] = None

    def tokens_before(self, entry: T) -> int:
        """Of the prompts that would have their turn before that of somebody new."""
        return sum(retry.cost for retry in self._retries) + self._fair.tokens_before(entry)

    def peek(self) -> T | None:
        return next(iter(self._retries)) if self._retries else self._fair.peek()

    def pop(self) -> T:
        """Raises: IndexError when nobody waits."""
        if not self._retries:
            return self._fair.pop()
        entry = next(iter(self._retries))
        del self._retries[entry]
        return entry

    def discard(self, entry: T) -> None:
        """It leaves, if it is still there."""
        self._retries.pop(entry, None)
        if entry in self._fair:
            self._fair.remove(entry)

    def _has_room(self, entry: T) -> bool:
        num_tokens = self._fair.num_tokens
        fits = num_tokens == 0 or num_tokens + entry.cost <= self._bounds.max_tokens
        return fits and len(self._fair) < self._bounds.max_requests

    def _make_room(self, entry: T) -> list[T]:
        self._require_less(entry.tenant, entry.cost)
        pushed_out: list[T] = []
        for newest in self._fair.newest_first(self._fair.heaviest()):
            pushed_out.append(newest)
            if self._has_room(entry):
                break
        return pushed_out

    def _require_less(self, tenant: str, cost: int) -> None:
        """Than the heaviest has; what leaves for such a prompt is no more than it brings and one prompt: then the
        heaviest is still the heavier of the two. Raises: QueueFull."""
        heaviest = self._fair.heaviest()
        never_fits = cost > self._bounds.max_tokens
        if never_fits or self._fair.tokens_of(heaviest) < self._fair.tokens_of(tenant) + 2 * cost:
            waiting = f"{len(self._fair)} requests with {self._fair.num_tokens} prompt tokens"
            raise QueueFull(f"{waiting} are already waiting; retry later")
