"""Whose request is next: deficit round robin over tenants (Shreedhar and Varghese 1995), by prompt tokens to compute.

Each tenant that waits gets QUANTUM_TOKENS a round and may save them up for a long prompt, but not for later: one with
nothing waiting has nothing saved. So the tokens that two waiting tenants are given differ by at most a quantum and two
prompts, whatever the lengths of their queues and prompts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

from router.priority_lanes import PriorityLanes, Queued

QUANTUM_TOKENS = 1024  # small, so that turns are short; a prompt takes its length / QUANTUM_TOKENS rounds to come up

T = TypeVar("T", bound=Queued)


class FairQueue(Generic[T]):
    """Every operation takes constant time for each quantum of tokens that it concerns, however many wait."""

    def __init__(self) -> None:
        self._turns: OrderedDict[str, _Turn[T]] = OrderedDict()  # by tenant; the first one is having its turn
        self._entries: set[T] = set()
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, entry: T) -> bool:
        return entry in self._entries

    def push(self, entry: T) -> None:
        self._turns.setdefault(entry.tenant, _Turn()).lanes.push(entry)
        self._entries.add(entry)
        self.num_tokens += entry.cost

    def peek(self) -> T | None:
        """Who is next. It stays so until somebody arrives with a higher priority, or it leaves."""
        while self._turns:
            tenant, turn = next(iter(self._turns.items()))
            if not turn.has_begun:
                turn.has_begun = True
                turn.deficit += QUANTUM_TOKENS
            entry = turn.lanes.peek()
            if entry.cost <= turn.deficit:
                return entry
            turn.has_begun = False
            self._turns.move_to_end(tenant)
        return None

    def pop(self) -> T:
        """Raises: IndexError when nobody waits."""
        entry = self.peek()
        if entry is None:
            raise IndexError("pop from an empty queue")
        turn = self._turns[entry.tenant]
        turn.deficit -= entry.cost
        turn.lanes.served(entry)
        self._left(entry)
        return entry

    def remove(self, entry: T) -> None:
        """It no longer wants a turn, and has had none."""
        self._turns[entry.tenant].lanes.remove(entry)
        self._left(entry)

    def tokens_of(self, tenant: str) -> int:
        turn = self._turns.get(tenant)
        return 0 if turn is None else turn.lanes.num_tokens

    def tokens_before(self, entry: T) -> int:
        """That would be given before somebody new gets its turn: of each other tenant no more than of its own."""
        own = self.tokens_of(entry.tenant)
        others = (turn.lanes.num_tokens for tenant, turn in self._turns.items() if tenant != entry.tenant)
        return own + sum(min(tokens, own + entry.cost) for tokens in others)

    def heaviest(self) -> str:
        """The tenant with the most tokens waiting; takes time for each tenant. Somebody must wait."""
        return max(self._turns, key=self.tokens_of)

    def newest_first(self, tenant: str) -> Iterator[T]:
        """Removes what it yields."""
        while (turn := self._turns.get(tenant)) is not None:
            entry = turn.lanes.newest()
            self.remove(entry)
            yield entry

    def _left(self, entry: T) -> None:
        self._entries.remove(entry)
        self.num_tokens -= entry.cost
        if not self._turns[entry.tenant].lanes:
            del self._turns[entry.tenant]


class _Turn(Generic[T]):
    def __init__(self) -> None:
        self.lanes: PriorityLanes[T] = PriorityLanes()
        self.deficit = 0  # tokens that it may still be given
        self.has_begun = False
