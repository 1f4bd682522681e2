"""What a worker has still to compute of prompts, between two heartbeats too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

# What was given to a worker as shortly before its heartbeat may not have reached it by then.
UNDER_WAY_S = 0.05


class PromptBacklog:
    """Its last heartbeat's word, which counts every router's requests and all progress, and what this router has given
    it since."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._reported = 0
        self._reported_s = self._busy_s = clock()
        self._given: dict[object, tuple[float, int]] = {}  # when, and how many tokens

    @property
    def tokens(self) -> int:
        fresh_s = self._reported_s - UNDER_WAY_S
        return self._reported + sum(tokens for given_s, tokens in self._given.values() if given_s > fresh_s)

    @property
    def given_tokens(self) -> int:
        """By this router and not seen the end of, whatever has been computed of it."""
        return sum(tokens for _, tokens in self._given.values())

    @property
    def idle_s(self) -> float:
        """Since it last had anything to compute."""
        return 0.0 if self._given else self._clock() - self._busy_s

    def heard(self, uncached_tokens: int) -> None:
        self._reported = uncached_tokens
        self._reported_s = self._clock()
        if uncached_tokens:
            self._busy_s = self._reported_s

    @contextmanager
    def holding(self, num_tokens: int) -> Iterator[None]:
        """From the choice of the worker until the prompt is computed, or will not be."""
        key = object()
        self._given[key] = self._clock(), num_tokens
        try:
            yield
        finally:
            del self._given[key]
            self._busy_s = self._clock()
