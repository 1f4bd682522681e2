"""What is measured, in which order: start, warm up, and everything again for every pass."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from cluster.plan import Plan, available_cores
from common.config import ServeConfig
from servingbench.client import BenchFailed, Client, connected
from servingbench.figures import Figure, Pass, PromptSample, figures_of
from servingbench.system import Configuration, handing_over, plan_for, run_system, until_ready

PROMPT_LENGTHS = (128, 512, 1024, 2048)
PROMPT_OUTPUT_TOKENS = 16  # one for the TTFT, one for the handoff, the rest for the decode step
STREAMS = (1, 4, 16)
STREAM_PROMPT_TOKENS = 64
STREAM_OUTPUT_TOKENS = 64
MAX_STARTS = 3
READY_TIMEOUT_S = 600.0

Say = Callable[[str], None]


@dataclass(frozen=True)
class Bench:
    config: ServeConfig
    repeats: int
    say: Say  # told in a few words what has just been done

    async def measure(self, configuration: Configuration) -> list[Figure]:
        """Starts the system a few times for the time to ready, and measures the rest on the last one.

        Raises: ConfigError, MemberGivenUp, ServingError, BenchFailed.
        """
        ready_s: list[float] = []
        passes: list[Pass] = []
        num_starts = min(self.repeats, MAX_STARTS)
        for start in range(1, num_starts + 1):
            num_passes = self.repeats if start == num_starts else 0
            plan = plan_for(configuration, handing_over(self.config), available_cores())
            with TemporaryDirectory(prefix="pdserve-bench-") as folder:
                life = await run_system(plan, Path(folder), partial(self._one_life, configuration.name, num_passes))
            ready_s.append(life.ready_s)
            passes += life.passes
        return figures_of(configuration.name, ready_s, passes)

    async def _one_life(self, name: str, num_passes: int, plan: Plan) -> _Life:
        start_s = time.monotonic()
        try:
            workers = await until_ready(plan, READY_TIMEOUT_S)
        except TimeoutError as error:
            raise BenchFailed(f"{name} was not ready within {READY_TIMEOUT_S:.0f} s") from error
        life = _Life(time.monotonic() - start_s)
        self.say(f"{name}: ready in {life.ready_s:.1f} s")
        if num_passes == 0:
            return life
        async with connected(plan.grpc_address, workers, plan.config.security.cluster_access()) as client:
            await one_pass(client)  # every shape once: the first one is slower
            self.say(f"{name}: warmed up")
            for number in range(1, num_passes + 1):
                life.passes.append(await one_pass(client))
                self.say(f"{name}: pass {number} of {num_passes}")
        return life


@dataclass(frozen=True)
class _Life:
    """What one start of the system gave."""

    ready_s: float
    passes: list[Pass] = field(default_factory=list)


async def one_pass(client: Client) -> Pass:
    """Everything once, one thing at a time. Raises: ServingError, BenchFailed."""
    prompts = {num_tokens: await _prompt_sample(client, num_tokens) for num_tokens in PROMPT_LENGTHS}
    tpot_s = {num_streams: await _tpot_of_each(client, num_streams) for num_streams in STREAMS}
    return Pass(prompts, tpot_s)


async def _prompt_sample(client: Client, num_tokens: int) -> PromptSample:
    [prompt] = client.prompts(1, num_tokens)
    before = await client.kv_bytes_sent()
    answer = await client.ask(prompt, PROMPT_OUTPUT_TOKENS)
    after = await client.kv_bytes_sent()
    return answer.sample(None if before is None or after is None else after - before)


async def _tpot_of_each(client: Client, num_streams: int) -> list[float]:
    prompts = client.prompts(num_streams, STREAM_PROMPT_TOKENS)
    return [answer.timings.tpot_s for answer in await client.ask_each(prompts, STREAM_OUTPUT_TOKENS)]
