"""One tenant's waiting requests in three lanes of priority. Within a lane: first come, first served."""

from __future__ import annotations

from collections import OrderedDict
from enum import StrEnum
from typing import Generic, Protocol, TypeVar


class Priority(StrEnum):
    """Among the requests of one tenant; between tenants it counts for nothing, or everybody would be in a hurry."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


# Weights, not ranks: of the tokens that a tenant gets while all lanes wait, so many parts each. None starves.
WEIGHTS = {Priority.HIGH: 16, Priority.NORMAL: 4, Priority.LOW: 1}


class Queued(Protocol):
    """What waits. Hashed by identity."""

    @property
    def tenant(self) -> str: ...

    @property
    def priority(self) -> Priority: ...

    @property
    def cost(self) -> int:
        """Prompt tokens to compute, at least 1. It must not change while it waits."""


T = TypeVar("T", bound=Queued)


class PriorityLanes(Generic[T]):
    """Start-time fair queuing (Goyal et al. 1996): next is the lane that has had the least for its weight.

    A lane that was empty starts level with the others, having saved nothing up, and ties go to the higher priority.
    """

    def __init__(self) -> None:
        self._lanes: dict[Priority, _Lane[T]] = {priority: _Lane() for priority in Priority}
        self._now = 0.0  # virtual time
        self.num_tokens = 0

    def __bool__(self) -> bool:
        return any(lane.entries for lane in self._lanes.values())

    def push(self, entry: T) -> None:
        lane = self._lanes[entry.priority]
        if not lane.entries:
            lane.start = max(lane.start, self._now)
        lane.entries[entry] = None
        self.num_tokens += entry.cost

    def peek(self) -> T:
        """Who is next. There must be somebody."""
        waiting = [lane for lane in self._lanes.values() if lane.entries]
        return next(iter(min(waiting, key=lambda lane: lane.start).entries))

    def served(self, entry: T) -> None:
        """Remove it, and count it."""
        lane = self._lanes[entry.priority]
        self._now = lane.start
        lane.start += entry.cost / WEIGHTS[entry.priority]
        self.remove(entry)

    def remove(self, entry: T) -> None:
        del self._lanes[entry.priority].entries[entry]
        self.num_tokens -= entry.cost

    def newest(self) -> T:
        """Of the lowest priority that waits. There must be somebody."""
        return next(reversed([lane for lane in self._lanes.values() if lane.entries][-1].entries))


class _Lane(Generic[T]):
    def __init__(self) -> None:
        # in order, and quick to leave anywhere: a dict would search past all that have left before its first
        self.entries: OrderedDict[T, None] = OrderedDict()
        self.start = 0.0  # virtual time at which its next entry begins
