from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from router.stop import StopStrings

TEXT = st.text(st.sampled_from("ab好"), max_size=30)
STOPS = st.lists(st.text(st.sampled_from("ab好"), min_size=1, max_size=5), max_size=4)


def whole_text_cut(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The oracle: look at every beginning of the whole text; the first that ends with a stop string decides."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


def streamed(pieces: Sequence[str], stops: Sequence[str]) -> tuple[list[str], bool]:
    watcher = StopStrings(stops)
    shown = []
    for piece in pieces:
        shown.append(watcher.push(piece))
        if watcher.is_complete:
            return shown, True
    return [*shown, watcher.flush()], False


@given(TEXT, STOPS, st.lists(st.integers(0, 30), max_size=10))
def test_the_cut_is_the_oracles_wherever_token_borders_lie(text: str, stops: list[str], cuts: list[int]) -> None:
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(borders)]
    shown, is_stopped = streamed(pieces, stops)
    assert ("".join(shown), is_stopped) == whole_text_cut(text, stops)


@given(TEXT, STOPS)
def test_text_that_cannot_begin_a_stop_string_is_never_held_back(text: str, stops: list[str]) -> None:
    watcher = StopStrings(stops)
    for end in range(1, len(text) + 1):
        watcher.push(text[end - 1])
        if watcher.is_complete:
            return
    held = watcher.flush()
    assert held == "" or any(stop.startswith(held) for stop in stops)


def test_a_stop_string_over_several_tokens_is_cut_out_and_never_shown() -> None:
    assert streamed(["one\n", "\nUs", "er:", " two"], ["\n\nUser:"]) == (["one", "", ""], True)


def test_what_only_looked_like_a_stop_string_is_shown_late_but_whole() -> None:
    assert streamed(["x<", "en", "ter>"], ["<end>"]) == (["x", "", "<enter>", ""], False)


def test_of_two_that_end_together_the_longer_wins() -> None:
    assert streamed(["a", "b", "c"], ["bc", "abc"]) == (["", "", ""], True)
