"""What is asked of the router, and the raw samples that come of it. All of it with one client, in one event loop."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from routerbench.answer import Answer, Client, Question
from routerbench.router_process import RouterProcess
from routerbench.stub_process import SentTimes


@dataclass(frozen=True)
class LatencySample:
    """In seconds, of all the answers of one pass."""

    ttft_s: list[float]
    itl_s: list[float]  # without the gap after the first token, which waits for the next tick
    delay_s: list[float]  # a worker sends a token → it is at the client


@dataclass(frozen=True)
class RateSample:
    seconds: float
    cpu_s: float  # of the router
    num_requests: int
    num_tokens: int
    num_events: int  # fewer where one event brought several tokens
    steady_events_per_s: float  # without the first and the last tenth

    @property
    def tokens_per_s(self) -> float:
        return self.steady_events_per_s * self.num_tokens / self.num_events


async def conversations(client: Client, question: Question, num_streams: int, num_answers: int) -> list[Answer]:
    """num_streams at once, each one answer after the other, with pauses in between so that they do not keep in step."""
    pauses = random.Random(0)

    async def converse() -> list[Answer]:
        answers = []
        for _ in range(num_answers):
            await asyncio.sleep(pauses.uniform(0.0, 0.1))
            answers.append(await client.ask(question))
        return answers

    return [answer for each in await all_of([converse() for _ in range(num_streams)]) for answer in each]


def latency_of(answers: Sequence[Answer], sent_s: SentTimes) -> LatencySample:
    sample = LatencySample([], [], [])
    for answer in answers:
        sample.ttft_s.append(answer.event_s[0] - answer.start_s)
        sample.itl_s.extend(later - earlier for earlier, later in pairwise(answer.event_s[1:]))
        sent = sent_s[answer.request_id]
        if len(sent) == len(answer.event_s):  # else it cannot be told which event brought which token
            sample.delay_s.extend(came - left for came, left in zip(answer.event_s, sent, strict=True))
    return sample


@dataclass
class _Tally:
    """Of answers, which are not kept: there may be many."""

    num_left: int
    num_tokens: int = 0
    event_s: list[float] = field(default_factory=list)


async def closed_loop(
    client: Client, question: Question, num_clients: int, num_requests: int, router: RouterProcess
) -> RateSample:
    """num_clients at once, each asks again as soon as it is answered."""
    tally = _Tally(num_requests)

    async def ask_on() -> None:
        while tally.num_left > 0:
            tally.num_left -= 1
            answer = await client.ask(question)
            tally.num_tokens += answer.num_tokens
            tally.event_s += answer.event_s

    start_s, start_cpu_s = time.monotonic(), router.cpu_s()
    await all_of([ask_on() for _ in range(num_clients)])
    seconds, cpu_s = time.monotonic() - start_s, router.cpu_s() - start_cpu_s
    return RateSample(
        seconds, cpu_s, num_requests, tally.num_tokens, len(tally.event_s), _steady_rate(sorted(tally.event_s))
    )


def _steady_rate(event_s: Sequence[float]) -> float:
    first, last = len(event_s) // 10, len(event_s) - 1 - len(event_s) // 10
    return (last - first) / (event_s[last] - event_s[first]) if last > first else 0.0


async def all_of(work: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Raises: as the first that fails, which ends the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
