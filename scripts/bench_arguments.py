"""What the scripts' command lines have in common: types for argparse, each with a message that says what would do."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable, Collection
from math import inf
from pathlib import Path
from typing import TypeVar

Value = TypeVar("Value")


def count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a number from 1 up")
    return int(text)


def counts(text: str) -> tuple[int, ...]:
    """A list, each once."""
    parts = text.split(",")
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ArgumentTypeError(f"{text!r} is not a list of numbers from 1 up")
    return tuple(dict.fromkeys(map(int, parts)))


def above_zero(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < inf:
        raise ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def some_of(known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """A list, each once."""

    def parse(text: str) -> tuple[str, ...]:
        chosen = tuple(dict.fromkeys(text.split(",")))
        if not set(chosen) <= set(known):
            raise ArgumentTypeError(f"{text!r} is not a list of {', '.join(known)}")
        return chosen

    return parse


def writable(text: str) -> Path:
    path = Path(text)
    if not path.parent.is_dir() or path.is_dir():
        raise ArgumentTypeError(f"{path} is not a file in an existing folder")
    return path


def explained(parse: Callable[[str], Value]) -> Callable[[str], Value]:
    """argparse shows the message of its own error, not of a ValueError."""

    def parse_or_say_why(text: str) -> Value:
        try:
            return parse(text)
        except ValueError as error:
            raise ArgumentTypeError(f"{text!r}: {error}") from error

    return parse_or_say_why
