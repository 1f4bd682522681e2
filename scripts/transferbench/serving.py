"""The handoff of a real system: one prefill and one decode worker over the configured transport."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from cluster.plan import Plan, available_cores
from common.config import ServeConfig
from common.lifecycle import Stage
from servingbench.client import Answer, BenchFailed, Client, connected
from servingbench.measure import PROMPT_OUTPUT_TOKENS, READY_TIMEOUT_S
from servingbench.system import Configuration, handing_over, plan_for, run_system, until_ready

ENOUGH_TOKENS = 1024

Say = Callable[[str], None]


@dataclass(frozen=True)
class Load:
    num_tokens: int  # of each prompt
    in_flight: int  # prompts at once

    def __str__(self) -> str:
        return f"{self.num_tokens}_tokens_{self.in_flight}_in_flight"


@dataclass(frozen=True)
class Loads:
    lengths: Sequence[int]  # prompt tokens
    in_flight: Sequence[int]

    @property
    def each(self) -> list[Load]:
        return [Load(length, in_flight) for length in self.lengths for in_flight in self.in_flight]


@dataclass(frozen=True)
class Handoff:
    """Of one request."""

    exposed_s: float
    prefill_s: float


@dataclass(frozen=True)
class Sending:
    """Prefill times of prompts of one length, each alone, in turns."""

    sent_s: Sequence[float]  # their KV was sent
    unsent_s: Sequence[float]  # they ended with their first token, so it was not

    @property
    def cost(self) -> float:
        return median(self.sent_s) / median(self.unsent_s) - 1


@dataclass(frozen=True)
class HandoffPass:
    """Everything once."""

    handoffs: Mapping[Load, Sequence[Handoff]]
    sending: Mapping[int, Sending]  # by prompt length


@dataclass(frozen=True)
class HandoffBench:
    config: ServeConfig
    loads: Loads
    repeats: int
    say: Say

    async def measure(self) -> list[HandoffPass]:
        """Starts the system and stops it. Raises: ConfigError, MemberGivenUp, ServingError, BenchFailed."""
        plan = plan_for(Configuration(self.config.transfer.transport), handing_over(self.config), available_cores())
        with TemporaryDirectory(prefix="pdserve-bench-") as folder:
            return await run_system(plan, Path(folder), self._measure_on)

    async def _measure_on(self, plan: Plan) -> list[HandoffPass]:
        try:
            workers = await until_ready(plan, READY_TIMEOUT_S)
        except TimeoutError as error:
            raise BenchFailed(f"the system was not ready within {READY_TIMEOUT_S:.0f} s") from error
        passes = []
        async with connected(plan.grpc_address, workers, plan.config.security.cluster_access()) as client:
            for length in self.loads.lengths:  # every shape once: the first one is slower
                await client.ask_each(client.prompts(1, length), PROMPT_OUTPUT_TOKENS)
            self.say("handoff: warmed up")
            for number in range(1, self.repeats + 1):
                passes.append(await self._one_pass(client))
                self.say(f"handoff: pass {number} of {self.repeats}")
        return passes

    async def _one_pass(self, client: Client) -> HandoffPass:
        sending = {num_tokens: await _sending(client, num_tokens) for num_tokens in self.loads.lengths}
        return HandoffPass({load: await _handoffs(client, load) for load in self.loads.each}, sending)


async def _sending(client: Client, num_tokens: int) -> Sending:
    sent, unsent = [], []
    for _ in range(_num_rounds(num_tokens)):
        sent += await client.ask_each(client.prompts(1, num_tokens), PROMPT_OUTPUT_TOKENS)
        unsent += await client.ask_each(client.prompts(1, num_tokens), 1)
    return Sending(*([answer.stage_s(Stage.PREFILL) for answer in answers] for answers in (sent, unsent)))


async def _handoffs(client: Client, load: Load) -> list[Handoff]:
    answers = []
    for _ in range(_num_rounds(load.num_tokens * load.in_flight)):
        answers += await client.ask_each(client.prompts(load.in_flight, load.num_tokens), PROMPT_OUTPUT_TOKENS)
    return [handoff_of(answer) for answer in answers]


def _num_rounds(num_tokens: int) -> int:
    """Short prompts are asked more often: what is looked for is small beside the noise of one."""
    return max(1, ENOUGH_TOKENS // num_tokens)


def handoff_of(answer: Answer) -> Handoff:
    return Handoff(answer.sample(num_bytes=None).exposed_handoff_s, answer.stage_s(Stage.PREFILL))
