"""Stop strings: text flows through until one of them is complete, and the answer ends just before it."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches one answer. The cut does not depend on where token borders lie.

    The first stop string to become complete ends the answer; of several that end on the same character, the longest.
    Text that may be the beginning of one is held back until that is decided.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._matchers = [_Matcher(stop) for stop in stops]
        self._held = ""
        self.is_complete = False

    def push(self, text: str) -> str:
        """The text that certainly belongs to the answer. Once a stop string is complete: the last of it."""
        assert not self.is_complete, "the answer has already ended"
        if not self._matchers:
            return text
        pending = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            complete = [len(matcher.pattern) for matcher in self._matchers if matcher.push(character)]
            if complete:
                self.is_complete = True
                self._held = ""
                return pending[: end - max(complete)]
        safe = len(pending) - max(matcher.matched for matcher in self._matchers)
        self._held = pending[safe:]
        return pending[:safe]

    def flush(self) -> str:
        """What was held back, now that no more text comes."""
        held, self._held = self._held, ""
        return held


class _Matcher:
    """How much of one pattern the text ends with, kept per character (Knuth, Morris, Pratt 1977)."""

    def __init__(self, pattern: str) -> None:
        assert pattern, "an empty string would stop every answer"
        self.pattern = pattern
        self.matched = 0
        self._borders = _borders(pattern)

    def push(self, character: str) -> bool:
        """Whether the pattern is complete with this character. It is not pushed to again after that."""
        self.matched = _extend(self.pattern, self._borders, self.matched, character)
        return self.matched == len(self.pattern)


def _borders(pattern: str) -> list[int]:
    """borders[n]: length of the longest proper prefix of pattern[:n] that is also its suffix."""
    borders = [0, 0]
    for character in pattern[1:]:
        borders.append(_extend(pattern, borders, borders[-1], character))
    return borders


def _extend(pattern: str, borders: list[int], matched: int, character: str) -> int:
    """The longest prefix of the pattern that the text ends with, after one more character."""
    while matched and pattern[matched] != character:
        matched = borders[matched]
    return matched + (pattern[matched] == character)
