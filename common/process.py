"""How every pdserve process starts, waits for its end, and reports a mistake in its configuration."""

from __future__ import annotations

import argparse
import asyncio
import logging
import resource
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from common.config import Role, ServeConfig, load_config
from common.errors import ConfigError
from common.logs import setup_logging

logger = logging.getLogger(__name__)

EXIT_CONFIG = 2  # the operator must change something; restarting does not help


def allow_many_connections() -> None:
    """Raise this process's limit of open files as far as it may: many systems begin with 1,024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class Service(Protocol):
    """Something that serves until it is stopped or can no longer go on."""

    async def wait_crashed(self) -> BaseException:
        """Returns only when the service cannot go on."""

    async def stop(self) -> None:
        """End every request and release everything. Safe to call once."""


def run_process(name: str, start: Callable[[], Awaitable[Service]]) -> int:
    """Run a service until SIGINT or SIGTERM. Exit status: 0 stopped, 1 crashed, 2 (EXIT_CONFIG) misconfigured."""
    setup_logging(name)
    try:
        return asyncio.run(_serve(start))
    except ConfigError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return EXIT_CONFIG


async def _serve(start: Callable[[], Awaitable[Service]]) -> int:
    stop_asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop_asked.set)
    starting = asyncio.ensure_future(start())
    stopping = asyncio.create_task(stop_asked.wait())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return 0
    service = await starting
    crashing = asyncio.create_task(service.wait_crashed())
    await asyncio.wait({crashing, stopping}, return_when=asyncio.FIRST_COMPLETED)
    has_crashed = crashing.done()
    crashing.cancel()
    stopping.cancel()
    await service.stop()
    return 1 if has_crashed else 0


@dataclass(frozen=True)
class WorkerOptions:
    """The command line of a worker that runs bare: python -m decode_worker --config serve.yaml ..."""

    config_path: Path
    name: str
    router: str
    role: Role

    def config(self) -> ServeConfig:
        return load_config(self.config_path)


def worker_options(program: str, roles: tuple[Role, ...]) -> WorkerOptions:
    """Parse the command line. The first role is the default; a second one adds the switch of its name."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=f"One {roles[0]} worker of pdserve.")
    parser.add_argument("--config", type=Path, default=Path("serve.yaml"), help="default: serve.yaml")
    parser.add_argument("--name", help=f"stable over restarts; default: {roles[0]}-0")
    parser.add_argument("--router", default="127.0.0.1:8002", help="the router's control address")
    for role in roles[1:]:
        parser.add_argument(f"--{role}", action="store_const", const=role, dest="role", help=f"run as {role}")
    parser.set_defaults(role=roles[0])
    given = parser.parse_args()
    return WorkerOptions(given.config, given.name or f"{given.role}-0", given.router, given.role)
