"""What is measured, in which order: for each pool of stub workers latency, rates and memory, with the same router."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from cluster.registry_client import follow_status
from common.cluster_access import NO_SECRET
from common.config import Role, ServeConfig
from common.model_source import resolve_model
from router.tokenizer import Tokenizer, load_tokenizer
from routerbench.answer import Answer, Client, Question
from routerbench.grpc_clients import DirectClient, GrpcClient
from routerbench.http_client import HttpClient
from routerbench.load import LatencySample, RateSample, closed_loop, conversations, latency_of
from routerbench.router_process import RouterProcess, pinned_to, running_router
from routerbench.stub_process import Start, StubProcess
from routerbench.stub_workers import Pace

Say = Callable[[str], None]

POOLS = {"colocated": (Role.COLOCATED,), "pair": (Role.PREFILL, Role.DECODE)}
APIS = ("http", "grpc")
DIRECT = "direct"  # to the workers, without the router
READY_S = 30.0
SETTLE_S = 1.0  # for memory to come to rest
ANSWER_LETTERS = "abcdefgh"  # each is one token in every vocabulary that holds the bytes


@dataclass(frozen=True)
class Sizes:
    """How much of everything."""

    prompt_tokens: int
    passes: int
    latency_streams: int
    latency_answers: int  # of each stream, in each pass
    latency_tokens: int
    latency_step_s: float
    rate_streams: int  # at once, as fast as the router takes them
    rate_tokens: int  # of each answer
    paced_streams: int  # at once, each at its own reading speed
    paced_tokens: int  # of each answer
    num_requests: int
    open_streams: int
    memory_requests: int  # 0: not measured


FULL = Sizes(128, 3, 16, 6, 32, 0.02, 64, 256, 100, 150, 2000, 400, 100_000)
QUICK = Sizes(128, 1, 4, 2, 16, 0.01, 8, 32, 10, 20, 100, 20, 1000)
PACED_STEP_S = 0.02
REQUEST_CLIENTS = 32
REQUEST_TOKENS = 4


@dataclass
class PoolSamples:
    """By API, latency also by DIRECT. A pass each."""

    latency: dict[str, list[LatencySample]] = field(default_factory=dict)
    streams: dict[str, list[RateSample]] = field(default_factory=dict)
    paced: dict[str, list[RateSample]] = field(default_factory=dict)
    requests: dict[str, list[RateSample]] = field(default_factory=dict)


@dataclass(frozen=True)
class MemorySample:
    per_stream_bytes: float
    by_requests: dict[int, int]  # resident bytes after so many requests


@dataclass
class Samples:
    """Pools and memory that were measured to the end."""

    pools: dict[str, PoolSamples] = field(default_factory=dict)
    memory: MemorySample | None = None


@dataclass(frozen=True)
class Bench:
    config: ServeConfig
    sizes: Sizes
    say: Say  # told in a few words what has just been done

    async def measure(self, samples: Samples) -> None:
        """Raises: ConfigError, ModelError, ServingError, AnswerFailed, OSError, HostError, RouterFailed."""
        tokenizer = load_tokenizer(resolve_model(self.config.model.source))
        router_core, *others = sorted(os.sched_getaffinity(0))
        with (
            TemporaryDirectory(prefix="pdserve-bench-") as folder,
            pinned_to(set(others) or {router_core}),
            StubProcess() as stubs,
        ):
            async with running_router(self.config, router_core, Path(folder)) as router:
                system = System(router, stubs, tokenizer, self.config.model.served_name)
                for pool, roles in POOLS.items() if self.sizes.passes else ():
                    async with system.serving(roles) as clients:
                        samples.pools[pool] = await self._measure_pool(pool, system, clients)
                if self.sizes.memory_requests:
                    async with system.serving(POOLS["pair"]) as clients:
                        samples.memory = await self._measure_memory(system, clients["http"])

    async def _measure_pool(self, pool: str, system: System, clients: dict[str, Client]) -> PoolSamples:
        samples = PoolSamples()
        for number in range(self.sizes.passes + 1):
            is_warm_up = number == 0
            taken = PoolSamples() if is_warm_up else samples
            for way, client in clients.items():
                taken.latency.setdefault(way, []).append(await self._latency(system, client))
            for way in APIS:
                taken.streams.setdefault(way, []).append(await self._streams(system, clients[way]))
                taken.paced.setdefault(way, []).append(await self._paced(system, clients[way]))
                taken.requests.setdefault(way, []).append(await self._requests(system, clients[way]))
            self.say(f"{pool}: " + ("warmed up" if is_warm_up else f"pass {number} of {self.sizes.passes}"))
        return samples

    async def _latency(self, system: System, client: Client) -> LatencySample:
        sizes = self.sizes
        await system.stubs.set_pace(Pace(sizes.latency_step_s, keeps_times=True))
        question = system.question(sizes.prompt_tokens, sizes.latency_tokens)
        answers = await conversations(client, question, sizes.latency_streams, sizes.latency_answers)
        return latency_of(answers, await system.stubs.take_times())

    async def _streams(self, system: System, client: Client) -> RateSample:
        """As fast as the router takes them."""
        sizes = self.sizes
        await system.stubs.set_pace(Pace(0.0))
        question = system.question(sizes.prompt_tokens, sizes.rate_tokens)
        return await closed_loop(client, question, sizes.rate_streams, sizes.rate_streams, system.router)

    async def _paced(self, system: System, client: Client) -> RateSample:
        """Token by token, as from engines: none waits for another, so that each has its full price."""
        sizes = self.sizes
        await system.stubs.set_pace(Pace(PACED_STEP_S))
        question = system.question(sizes.prompt_tokens, sizes.paced_tokens)
        return await closed_loop(client, question, sizes.paced_streams, sizes.paced_streams, system.router)

    async def _requests(self, system: System, client: Client) -> RateSample:
        await system.stubs.set_pace(Pace(0.0))
        question = system.question(self.sizes.prompt_tokens, REQUEST_TOKENS)
        return await closed_loop(client, question, REQUEST_CLIENTS, self.sizes.num_requests, system.router)

    async def _measure_memory(self, system: System, client: Client) -> MemorySample:
        router = system.router
        by_requests: dict[int, int] = {}
        num_done = 0
        await system.stubs.set_pace(Pace(0.0))
        question = system.question(self.sizes.prompt_tokens, REQUEST_TOKENS)
        for target in (self.sizes.memory_requests * share // 10 for share in (1, 5, 10)):
            await closed_loop(client, question, REQUEST_CLIENTS, target - num_done, router)
            await asyncio.sleep(SETTLE_S)
            num_done = target
            by_requests[target] = router.resident_bytes()
            self.say(f"memory: {target:,} requests, {by_requests[target] / 2**20:,.1f} MB")
        return MemorySample(await self._bytes_per_stream(system, client), by_requests)

    async def _bytes_per_stream(self, system: System, client: Client) -> float:
        """Streams that have their first token and wait for the next."""
        num_streams = self.sizes.open_streams
        await system.stubs.set_pace(Pace(math.inf))
        before = system.router.resident_bytes()
        question = system.question(self.sizes.prompt_tokens, REQUEST_TOKENS)
        asking = asyncio.gather(*(client.ask(question) for _ in range(num_streams)))
        try:
            await system.until_active(num_streams, asking)
            return (system.router.resident_bytes() - before) / num_streams
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            self.say(f"memory: {num_streams} open streams")


@dataclass(frozen=True)
class System:
    """The router, its stub workers, and how to ask them."""

    router: RouterProcess
    stubs: StubProcess
    tokenizer: Tokenizer
    model: str

    @asynccontextmanager
    async def serving(self, roles: tuple[Role, ...]) -> AsyncIterator[dict[str, Client]]:
        """With these workers, in the order that DirectClient wants."""
        answer_ids = tuple(self.tokenizer.encode(letter)[-1] for letter in ANSWER_LETTERS)
        plan = self.router.plan
        order = Start(roles, plan.control_address, self.model, self.tokenizer.vocab_size, answer_ids)
        addresses = await self.stubs.start(order)
        async with asyncio.timeout(READY_S):
            await self.router.until_ready(len(roles))
        clients: dict[str, Client] = {
            DIRECT: DirectClient(addresses),
            "http": HttpClient(plan.http_url, self.model),
            "grpc": GrpcClient(plan.grpc_address),
        }
        async with AsyncExitStack() as stack:
            for client in clients.values():
                stack.push_async_callback(client.close)
            yield clients

    def question(self, prompt_tokens: int, answer_tokens: int) -> Question:
        text = " the" * prompt_tokens
        token_ids = self.tokenizer.encode(text)[:prompt_tokens]
        return Question(self.tokenizer.decode(token_ids), tuple(token_ids), answer_tokens)

    async def until_active(self, num_requests: int, asking: asyncio.Future[list[Answer]]) -> None:
        """Raises: TimeoutError."""
        async with (
            asyncio.timeout(READY_S),
            aclosing(follow_status(self.router.plan.control_address, NO_SECRET)) as statuses,
        ):
            async for status in statuses:
                if asking.done():
                    raise ConnectionError("streams ended that were to stay open")
                if status.num_active == num_requests:
                    await asyncio.sleep(SETTLE_S)
                    return
