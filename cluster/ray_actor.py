"""What runs inside a Ray worker process: one member, served until it is stopped."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cluster.host import MemberSpec
from cluster.plan import available_cores
from common.config import Role, SecuritySection, ServeConfig
from common.logs import setup_logging
from common.process import Service

LEFT = "left"


@dataclass(frozen=True)
class MemberOrder:
    """Everything an actor needs to become its member; plain values, so that it pickles."""

    spec: MemberSpec
    config: ServeConfig
    routers: tuple[str, ...]  # their control addresses
    log_path: Path | None  # None: stay in Ray's own logs, as on another machine
    is_spread: bool = False  # over several machines: listen on the node's own address


class MemberActor:
    """`serve` lasts as long as the member; a caller who awaits it learns of the end, however it comes."""

    def __init__(self, secret: bytes) -> None:
        """secret: the cluster's, which its node may have no file of; empty for the router."""
        self._secret = secret
        self._service: Service | None = None
        self._is_stopped = False

    async def serve(self, order: MemberOrder) -> str:
        """Returns why it ended, LEFT when it was drained. Raises: ConfigError when it cannot start."""
        if order.log_path is not None:
            _redirect_output(order.log_path)
        setup_logging(order.spec.name)
        self._service = await _start(order, self._secret)
        crashing = asyncio.ensure_future(self._service.wait_crashed())
        drained = asyncio.ensure_future(self._service.wait_drained())
        await asyncio.wait({crashing, drained}, return_when=asyncio.FIRST_COMPLETED)
        if not drained.done():
            drained.cancel()
            return f"crashed: {crashing.result()!r}"
        crashing.cancel()
        await self._stop()
        return LEFT

    async def stop(self) -> None:
        """Drains first, which ends `serve` too."""
        if self._service is not None:
            self._service.begin_drain()
            await self._service.wait_drained()
            await self._stop()

    async def _stop(self) -> None:
        if self._service is not None:
            service, self._service = self._service, None
            await service.stop()


async def _start(order: MemberOrder, secret: bytes) -> Service:
    config, name, role = order.config, order.spec.name, order.spec.role
    if role is None:
        from router.server import RouterServer  # each process loads its own role only

        if order.spec.control_port is not None:
            router = config.router.model_copy(update={"control_port": order.spec.control_port})
            config = config.model_copy(update={"router": router})
        return await RouterServer.start(config)
    if order.is_spread:
        config = _on_this_node(config, role)
    with _in_memory_file(secret) as path:
        config = config.model_copy(update={"security": SecuritySection(secret_file=path)})
        if role is Role.PREFILL:
            from prefill_worker.server import PrefillServer

            return await PrefillServer.start(config, name, order.routers)
        from decode_worker.server import DecodeServer

        return await DecodeServer.start(config, name, order.routers, role)


@contextmanager
def _in_memory_file(content: bytes) -> Iterator[Path]:
    """Of this process alone and on no disk, for as long as the worker needs to read it."""
    with os.fdopen(os.memfd_create("pdserve"), "wb", buffering=0) as file:
        file.write(content)
        yield Path(f"/proc/self/fd/{file.fileno()}")


def _on_this_node(config: ServeConfig, role: Role) -> ServeConfig:
    from ray.util import get_node_ip_address

    address: str = get_node_ip_address()  # type: ignore[no-untyped-call]
    pool = config.pool(role)
    threads = pool.num_threads or available_cores()  # Ray would leave torch a single one
    here = pool.model_copy(update={"host": address, "num_threads": threads})
    return config.model_copy(update={str(role): here})


def _redirect_output(log_path: Path) -> None:
    """From now on everything this process prints, native libraries included, goes to the member's log file."""
    with log_path.open("ab") as log:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
