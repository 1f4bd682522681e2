"""What is measured, in which order: start, warm up, and everything again for every pass."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from cluster.plan import Plan, available_cores
from common.config import ServeConfig
from common.errors import ServingError
from servingbench.client import Client, connected
from servingbench.figures import Figure, Pass, PromptSample, figures_of
from servingbench.system import Configuration, plan_for, run_system, until_ready

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
            plan = plan_for(configuration, self.config, available_cores())
            is_last = start == num_starts
            with TemporaryDirectory(prefix="pdserve-bench-") as folder:
                work = self._work(configuration, plan, ready_s, passes if is_last else None)
                await run_system(plan, Path(folder), work)
        return figures_of(configuration.name, ready_s, passes)

    async def _work(
        self, configuration: Configuration, plan: Plan, ready_s: list[float], passes: list[Pass] | None
    ) -> None:
        """`passes` None: only wait until it is ready."""
        start_s = time.monotonic()
        try:
            workers = await until_ready(plan, READY_TIMEOUT_S)
        except TimeoutError as error:
            raise ServingError(f"{configuration.name} was not ready within {READY_TIMEOUT_S:.0f} s") from error
        ready_s.append(time.monotonic() - start_s)
        self.say(f"{configuration.name}: ready in {ready_s[-1]:.1f} s")
        if passes is None:
            return
        async with connected(plan.grpc_address, workers) as client:
            await one_pass(client, seed=0)
            self.say(f"{configuration.name}: warmed up")
            for number in range(1, self.repeats + 1):
                passes.append(await one_pass(client, seed=number))
                self.say(f"{configuration.name}: pass {number} of {self.repeats}")


async def one_pass(client: Client, seed: int) -> Pass:
    """Everything once, one thing at a time. Raises: ServingError, BenchFailed."""
    prompts = {num_tokens: await _prompt_sample(client, num_tokens, seed) for num_tokens in PROMPT_LENGTHS}
    tpot_s = {num_streams: await _tpot_of_each(client, num_streams, seed) for num_streams in STREAMS}
    return Pass(prompts, tpot_s)


async def _prompt_sample(client: Client, num_tokens: int, seed: int) -> PromptSample:
    [prompt] = client.prompts(1, num_tokens, seed)
    before = await client.kv_bytes_sent()
    answer = await client.ask(prompt, PROMPT_OUTPUT_TOKENS)
    after = await client.kv_bytes_sent()
    return answer.sample(None if before is None or after is None else after - before)


async def _tpot_of_each(client: Client, num_streams: int, seed: int) -> list[float]:
    prompts = client.prompts(num_streams, STREAM_PROMPT_TOKENS, seed)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(client.ask(prompt, STREAM_OUTPUT_TOKENS)) for prompt in prompts]
    return [task.result().timings.tpot_s for task in tasks]
