"""Does load_test.py tell the truth? Its TTFT and TPOT beside a plain httpx client's, of the very same answers.

python scripts/check_load_test.py                             starts the disaggregated system of serve.yaml for it
python scripts/check_load_test.py --url http://127.0.0.1:8000 --num-requests 60 --concurrency 4

    load_test.py, a process of its own  →  relay: a plain httpx client with its own clock  →  the server

Both time every answer, so that no mood of the server comes between them; the relay adds some milliseconds to what the
load test sees. Prompts are new each time: beside a prefix cache's TTFT those milliseconds would be much. They share no
code. Exit status 1 when a mean or a median differs by more than 3 %.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import Response, StreamingResponse

from bench_arguments import count
from cluster.plan import Plan, available_cores
from common.config import ServeConfig, load_config
from servingbench.system import Configuration, plan_for, run_system, until_ready

LOAD_TEST = Path(__file__).parent / "load_test.py"
TOLERANCE = 0.03
NUM_WARMUPS = 4
READY_TIMEOUT_S = 600.0
EXIT_DISAGREED = 1


@dataclass
class Seen:
    """One answer as the relay saw it; seconds of its own clock."""

    start_s: float
    text_s: list[float] = field(default_factory=list)  # when each line with text, or the end, came
    num_tokens: int = 0

    @property
    def ttft_ms(self) -> float:
        return (self.text_s[0] - self.start_s) * 1000

    @property
    def tpot_ms(self) -> float:
        return (self.text_s[-1] - self.text_s[0]) / (self.num_tokens - 1) * 1000

    def note(self, line: str, now_s: float) -> None:
        if not line.startswith("data: {"):
            return
        event = json.loads(line[len("data: ") :])
        if event["choices"]:
            self.text_s.append(now_s)
        self.num_tokens = (event.get("usage") or {}).get("completion_tokens", self.num_tokens)


def main(arguments: Sequence[str] | None = None) -> int:
    options = argument_parser().parse_args(arguments)
    if options.url is not None:
        told, seen = asyncio.run(measure_both(options.url, options))
    else:
        told, seen = asyncio.run(_on_a_system_of_its_own(load_config(options.config), options))
    differences = [
        _compared(name, told[f"{name}_ms"], of(values))
        for latency, values in (("ttft", [each.ttft_ms for each in seen]), ("tpot", [each.tpot_ms for each in seen]))
        for name, of in ((f"mean_{latency}", mean), (f"median_{latency}", median))
    ]
    return EXIT_DISAGREED if max(differences) > TOLERANCE else 0


async def _on_a_system_of_its_own(
    config: ServeConfig, options: argparse.Namespace
) -> tuple[dict[str, Any], list[Seen]]:
    system = plan_for(Configuration(config.transfer.transport), config, available_cores())

    async def once_ready(plan: Plan) -> tuple[dict[str, Any], list[Seen]]:
        await until_ready(plan, READY_TIMEOUT_S)
        return await measure_both(plan.http_url, options)

    with TemporaryDirectory(prefix="pdserve-check-") as folder:
        return await run_system(system, Path(folder), once_ready)


async def measure_both(url: str, options: argparse.Namespace) -> tuple[dict[str, Any], list[Seen]]:
    """What the load test told, and what the relay saw, without the warm-ups.

    Raises: RuntimeError when the load test failed.
    """
    with TemporaryDirectory(prefix="pdserve-check-") as folder:
        path = Path(folder) / "result.json"
        async with _relaying(url) as (relay_url, seen):
            command = [sys.executable, str(LOAD_TEST), "--url", relay_url, "--json", str(path)]
            for name in ("num_requests", "concurrency", "input_tokens", "output_tokens"):
                command += [f"--{name.replace('_', '-')}", str(vars(options)[name])]
            command += ["--warmup", str(NUM_WARMUPS), "--seed", str(time.time_ns() // 1000)]
            process = await asyncio.create_subprocess_exec(*command)
            if (status := await process.wait()) != 0:
                raise RuntimeError(f"load_test.py ended with status {status}")
        return json.loads(path.read_text(encoding="utf-8")), seen[NUM_WARMUPS:]


@asynccontextmanager
async def _relaying(url: str) -> AsyncIterator[tuple[str, list[Seen]]]:
    """The relay's address, and what it has seen, in the order of arrival."""
    seen: list[Seen] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with httpx.AsyncClient(base_url=url, timeout=None, trust_env=False) as client:
            app = _relay(client, seen)
            server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            try:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}", seen
            finally:
                server.should_exit = True
                await serving


def _relay(client: httpx.AsyncClient, seen: list[Seen]) -> FastAPI:
    app = FastAPI()

    @app.get("/v1/models")
    async def models() -> Response:
        return Response((await client.get("/v1/models")).content, media_type="application/json")

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        answer = Seen(time.monotonic())
        seen.append(answer)
        return StreamingResponse(lines_of(await request.body(), answer), media_type="text/event-stream")

    async def lines_of(body: bytes, answer: Seen) -> AsyncIterator[str]:
        headers = {"Content-Type": "application/json"}
        async with client.stream("POST", "/v1/completions", content=body, headers=headers) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                answer.note(line, time.monotonic())
                yield line + "\n"

    return app


def _compared(name: str, told_ms: float, seen_ms: float) -> float:
    """Prints both. Returns how far apart they are, as a share of what the plain client saw."""
    difference = told_ms / seen_ms - 1
    verdict = "agrees" if abs(difference) <= TOLERANCE else f"more than {TOLERANCE:.0%} apart"
    print(f"{name}: load test {told_ms:.2f} ms, plain httpx {seen_ms:.2f} ms, {difference:+.2%}: {verdict}")
    return abs(difference)


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="check_load_test.py", description="The load test beside a plain client.")
    parser.add_argument("--url", help="a server that runs; default: the disaggregated system, started for this")
    parser.add_argument("--config", type=Path, default=Path("serve.yaml"), help="of the system that is started")
    parser.add_argument("--num-requests", type=count, default=40)
    parser.add_argument("--concurrency", type=count, default=2)
    parser.add_argument("--input-tokens", type=count, default=128)
    parser.add_argument("--output-tokens", type=count, default=48)
    return parser


if __name__ == "__main__":
    sys.exit(main())
