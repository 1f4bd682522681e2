"""How every pdserve process starts, waits for its end, and reports a mistake in its configuration."""

from __future__ import annotations

import argparse
import asyncio
import gc
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

DEFAULT_ROUTER = "127.0.0.1:8002"
EXIT_CONFIG = 2  # the operator must change something; restarting does not help


def allow_many_connections() -> None:
    """Raise this process's limit of open files as far as it may: many systems begin with 1,024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def freeze_heap() -> None:
    """Once everything is loaded: the garbage collector does not look at it again.

    A full collection of what torch and other libraries leave takes a worker 0.13 s and the router half of that, in
    which every stream stands still. Afterwards it looks at what requests leave, which is little.
    """
    gc.unfreeze()  # of an earlier call: what has become garbage since goes too
    gc.collect()
    gc.freeze()


class Service(Protocol):
    """Something that serves until it is stopped or can no longer go on."""

    async def wait_crashed(self) -> BaseException:
        """Returns only when the service cannot go on."""

    def begin_drain(self) -> None:
        """Take no new work. What runs may end by itself, within a bound. Safe to call again."""

    async def wait_drained(self) -> None:
        """Returns once somebody, not only `begin_drain`, has wished it to drain and nothing runs any more."""

    async def stop(self) -> None:
        """End every request and release everything. Safe to call once."""


def run_process(
    name: str, start: Callable[[], Awaitable[Service]], new_loop: Callable[[], asyncio.AbstractEventLoop] | None = None
) -> int:
    """Run a service until it is told to go: SIGTERM drains it first, SIGINT or a second SIGTERM stops it at once.

    Exit status: 0 stopped or drained, 1 crashed, 2 (EXIT_CONFIG) misconfigured.
    new_loop: the event loop to run in; asyncio's own by default.
    """
    setup_logging(name)
    try:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            return runner.run(_serve(start))
    except ConfigError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return EXIT_CONFIG


async def _serve(start: Callable[[], Awaitable[Service]]) -> int:
    drain_asked, stop_asked = asyncio.Event(), asyncio.Event()

    def on_sigterm() -> None:
        (stop_asked if drain_asked.is_set() else drain_asked).set()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stop_asked.set)
    loop.add_signal_handler(signal.SIGTERM, on_sigterm)
    starting = asyncio.ensure_future(start())
    draining = asyncio.create_task(drain_asked.wait())
    stopping = asyncio.create_task(stop_asked.wait())
    await asyncio.wait({starting, draining, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return 0
    service = await starting
    freeze_heap()
    draining.add_done_callback(lambda task: None if task.cancelled() else service.begin_drain())
    crashing = asyncio.create_task(service.wait_crashed())
    drained = asyncio.create_task(service.wait_drained())
    await asyncio.wait({crashing, drained, stopping}, return_when=asyncio.FIRST_COMPLETED)
    has_crashed = crashing.done() and not drained.done()
    for task in (crashing, drained, draining, stopping):
        task.cancel()
    await service.stop()
    return 1 if has_crashed else 0


@dataclass(frozen=True)
class WorkerOptions:
    """The command line of a worker that runs bare: python -m decode_worker --config serve.yaml ..."""

    config_path: Path
    name: str
    routers: list[str]
    role: Role
    num_threads: int | None  # in place of the config's

    def config(self) -> ServeConfig:
        config = load_config(self.config_path)
        return config if self.num_threads is None else config.with_threads(self.role, self.num_threads)


def worker_options(program: str, roles: tuple[Role, ...]) -> WorkerOptions:
    """Parse the command line. The first role is the default; a second one adds the switch of its name."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=f"One {roles[0]} worker of pdserve.")
    parser.add_argument("--config", type=Path, default=Path("serve.yaml"), help="default: serve.yaml")
    parser.add_argument("--name", help=f"stable over restarts; default: {roles[0]}-0")
    parser.add_argument(
        "--router", action="append", help=f"a router's control address, once for each; default: {DEFAULT_ROUTER}"
    )
    parser.add_argument("--num-threads", type=int, metavar="N", help="CPU threads; default: the config's")
    for role in roles[1:]:
        parser.add_argument(f"--{role}", action="store_const", const=role, dest="role", help=f"run as {role}")
    parser.set_defaults(role=roles[0])
    given = parser.parse_args()
    routers = given.router or [DEFAULT_ROUTER]
    return WorkerOptions(given.config, given.name or f"{given.role}-0", routers, given.role, given.num_threads)
