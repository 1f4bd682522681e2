"""What routers did again, by the line that each request leaves in their logs. It outlasts the router that wrote it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_ENDED = re.compile(r" attempts=(\d+) migrations=(\d+)\b")


@dataclass(frozen=True)
class Retries:
    num_retried: int = 0  # attempts after a request's first one
    num_migrated: int = 0  # those of them in the middle of an answer


def count_retries(lines: Iterable[str]) -> Retries:
    ended = [(int(match[1]), int(match[2])) for line in lines if (match := _ENDED.search(line))]
    return Retries(sum(max(0, attempts - 1) for attempts, _ in ended), sum(migrations for _, migrations in ended))
