"""Open-loop load: requests leave at a fixed rate, whatever becomes of those before."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from chaoslab.asks import Answer, Ask
from chaoslab.client import Client
from chaoslab.outcome import Outcome

SHARE_LEAVING = 0.1
LEAVES_WITHIN = 12  # pieces of text


@dataclass(frozen=True)
class Known:
    """A request and its fault-free answer."""

    ask: Ask
    answer: Answer


@dataclass(frozen=True)
class Sent:
    known: Known
    outcome: Outcome

    @property
    def mistake(self) -> str | None:
        return self.outcome.mistake(self.known.answer)


@dataclass(frozen=True)
class Load:
    seed: int
    rate: float  # requests per second
    duration_s: float

    async def run(self, client: Client, known: Sequence[Known], start_s: float, sent: list[Sent]) -> None:
        """Appends each request to `sent` as it leaves; returns when all have ended."""
        random = Random(self.seed)
        async with asyncio.TaskGroup() as group:
            for number in range(int(self.duration_s * self.rate)):
                await asyncio.sleep(start_s + number / self.rate - time.monotonic())
                one = Sent(random.choice(known), Outcome(f"chaos-{number}", time.monotonic()))
                sent.append(one)
                leaves_after = random.randint(1, LEAVES_WITHIN) if random.random() < SHARE_LEAVING else None
                group.create_task(client.send(one.known.ask, one.outcome, leaves_after))
