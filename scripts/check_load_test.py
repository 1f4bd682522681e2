"""Does load_test.py tell the truth? Its TTFT and TPOT beside those of a plain httpx client, in one run.

python scripts/check_load_test.py                             starts the disaggregated system of serve.yaml for it
python scripts/check_load_test.py --url http://127.0.0.1:8000 --pairs 60

The two take turns with requests of one size, and swap who goes first, so that both see the same server in the same
moods. The plain client shares no code with the load test. Exit status 1 when the medians differ by more than 3 %.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from cluster.plan import Plan, available_cores
from common.config import ServeConfig, load_config
from loadgen.http_target import Endpoint, HttpTarget
from loadgen.runner import clock, measure
from loadgen.workload import ClosedLoop, LengthRange, PlannedRequest, Workload, plan
from servingbench.system import Configuration, plan_for, run_system, until_ready

TOLERANCE = 0.03
NUM_WARMUPS = 4
TIMEOUT_S = 120.0
READY_TIMEOUT_S = 600.0
EXIT_DISAGREED = 1


@dataclass(frozen=True)
class Latencies:
    """Of one request, in seconds."""

    ttft_s: float
    tpot_s: float


@dataclass
class Pairs:
    """What each of the two saw, turn by turn."""

    load_test: list[Latencies] = field(default_factory=list)
    plain: list[Latencies] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.url is not None:
        pairs = asyncio.run(take_turns(options.url, _requests(options)))
    else:
        pairs = asyncio.run(_on_a_system_of_its_own(load_config(options.config), _requests(options)))
    disagreements = [_report(name, pairs, of) for name, of in (("TTFT", _ttft), ("TPOT", _tpot))]
    return EXIT_DISAGREED if max(disagreements) > TOLERANCE else 0


async def _on_a_system_of_its_own(config: ServeConfig, requests: Iterator[PlannedRequest]) -> Pairs:
    system = plan_for(Configuration(config.transfer.transport), config, available_cores())

    async def once_ready(plan: Plan) -> Pairs:
        await until_ready(plan, READY_TIMEOUT_S)
        return await take_turns(plan.http_url, requests)

    with TemporaryDirectory(prefix="pdserve-check-") as folder:
        return await run_system(system, Path(folder), once_ready)


async def take_turns(url: str, requests: Iterator[PlannedRequest]) -> Pairs:
    """Two requests a turn, after a few that do not count. Raises: RequestFailed, Unreachable, what httpx raises."""
    pairs = Pairs()
    target = HttpTarget(url, Endpoint.COMPLETIONS)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False) as client, _connected(target):
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        for turn, (ours, theirs) in enumerate(zip(requests, requests, strict=True), start=-NUM_WARMUPS):
            if turn % 2:
                loaded = await _by_load_test(target, ours)
                plain = await by_plain_client(client, model, theirs)
            else:
                plain = await by_plain_client(client, model, theirs)
                loaded = await _by_load_test(target, ours)
            if turn >= 0:
                pairs.load_test.append(loaded)
                pairs.plain.append(plain)
    return pairs


@asynccontextmanager
async def _connected(target: HttpTarget) -> AsyncIterator[None]:
    try:
        await target.connect()
        yield
    finally:
        await target.close()


async def _by_load_test(target: HttpTarget, request: PlannedRequest) -> Latencies:
    record = await measure(request, target, clock(), TIMEOUT_S)
    if record.failure is not None:
        raise record.failure
    assert record.ttft_s is not None
    assert record.tpot_s is not None  # more than one token was asked for
    return Latencies(record.ttft_s, record.tpot_s)


async def by_plain_client(client: httpx.AsyncClient, model: str, request: PlannedRequest) -> Latencies:
    """The answer's lines as they come, and the clock at the first and the last one with text."""
    body: dict[str, Any] = {"model": model, "prompt": request.prompt, "max_tokens": request.output_tokens}
    body |= {"temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    token_s: list[float] = []
    num_tokens = 0
    start_s = time.monotonic()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            now_s = time.monotonic()
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[len("data: ") :])
            if event["choices"]:
                token_s.append(now_s)
            num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
    return Latencies(token_s[0] - start_s, (token_s[-1] - token_s[0]) / (num_tokens - 1))


def _report(name: str, pairs: Pairs, of: Callable[[Latencies], float]) -> float:
    """Prints both medians. Returns how far apart they are, as a share of the plain client's."""
    loaded, plain = (median(map(of, side)) * 1000 for side in (pairs.load_test, pairs.plain))
    difference = disagreement(loaded, plain)
    verdict = "agrees" if difference <= TOLERANCE else f"more than {TOLERANCE:.0%} apart"
    print(f"{name}: load test {loaded:.2f} ms, plain httpx {plain:.2f} ms, {loaded / plain - 1:+.2%}: {verdict}")
    return difference


def disagreement(loaded: float, plain: float) -> float:
    return abs(loaded / plain - 1)


def _ttft(latencies: Latencies) -> float:
    return latencies.ttft_s


def _tpot(latencies: Latencies) -> float:
    return latencies.tpot_s


def _requests(options: argparse.Namespace) -> Iterator[PlannedRequest]:
    """Two for each turn, none with a beginning of another."""
    workload = Workload(
        pacing=ClosedLoop(1),
        input_tokens=LengthRange(options.input_tokens, options.input_tokens),
        output_tokens=LengthRange(options.output_tokens, options.output_tokens),
        num_requests=2 * (options.pairs + NUM_WARMUPS),
        seed=options.seed,
    )
    return plan(workload)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="check_load_test.py", description="The load test beside a plain client.")
    parser.add_argument("--url", help="a server that runs; default: the disaggregated system, started for this")
    parser.add_argument("--config", type=Path, default=Path("serve.yaml"), help="of the system that is started")
    parser.add_argument("--pairs", type=int, default=60, help="turns of two requests; default %(default)s")
    parser.add_argument("--input-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    sys.exit(main())
