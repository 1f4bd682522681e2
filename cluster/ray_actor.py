"""What runs inside a Ray worker process: one member, served until it is stopped."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cluster.host import MemberSpec
from cluster.plan import available_cores
from cluster.running import RunningDeployment
from common.config import Role, ServeConfig
from common.logs import setup_logging
from common.process import Service, freeze_heap

LEFT = "left"
LOG_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class MemberOrder:
    """Everything an actor needs to become its member; plain values, so that it pickles."""

    spec: MemberSpec
    config: ServeConfig
    routers: list[str]  # their control addresses
    log_path: Path | None  # on this machine; None: Ray's own log file of this process, as on another machine
    is_spread: bool = False  # over several machines: listen on the node's own address


@dataclass(frozen=True)
class Place:
    node: str  # its address
    log_path: Path | None  # of this process, there; None: it writes to the order's


class MemberActor:
    """`serve` lasts as long as the member; a caller who awaits it learns of the end, however it comes."""

    def __init__(self, order: MemberOrder, secret: bytes) -> None:
        """secret: the cluster's, which its node may have no file of; empty for the router."""
        self._order = order
        self._secret = secret
        self._service: Service | None = None
        self._own_log = _own_log() if order.log_path is None else None  # for `read_log`
        if (path := order.log_path or self._own_log) is not None:
            _redirect_output(path)

    async def place(self) -> Place:
        return Place(_node_address(), self._own_log)

    async def read_log(self, start: int) -> bytes:
        """Of its own log, from byte `start` on; empty at the end."""
        if self._own_log is None:
            return b""
        with self._own_log.open("rb") as log:
            log.seek(start)
            return log.read(LOG_CHUNK_BYTES)

    async def deployment(self) -> RunningDeployment:
        """A router's: how people's commands, on any node, reach it."""
        return RunningDeployment(self._order.routers[0], self._order.config.security.cluster_access())

    async def serve(self) -> str:
        """Returns why it ended, LEFT when it was drained. Raises: ConfigError when it cannot start."""
        setup_logging(self._order.spec.name)
        self._service = await _start(self._order, self._secret)
        freeze_heap()
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

    async def stop_at_once(self) -> None:
        """Also while `stop` drains."""
        await self._stop()

    async def _stop(self) -> None:
        if self._service is not None:
            service, self._service = self._service, None
            await service.stop()


async def _start(order: MemberOrder, secret: bytes) -> Service:
    config, name, role = order.config, order.spec.name, order.spec.role
    if role is None:
        from router.server import RouterServer  # each process loads its own role only

        if (ports := order.spec.admin_ports) is not None:
            router = config.router.model_copy(update={"control_port": ports.control, "metrics_port": ports.metrics})
            config = config.model_copy(update={"router": router})
        return await RouterServer.start(config)
    if order.spec.num_threads is not None:
        config = config.with_threads(role, order.spec.num_threads)
    if order.is_spread:
        config = _on_this_node(config, role)
    with _in_memory_file(secret) as path:
        security = config.security.model_copy(update={"secret_file": path})
        config = config.model_copy(update={"security": security})
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
    pool = config.pool(role)
    threads = pool.num_threads or available_cores()  # Ray would leave torch a single one
    here = pool.model_copy(update={"host": _node_address(), "num_threads": threads})
    return config.model_copy(update={str(role): here})


def _node_address() -> str:
    from ray.util import get_node_ip_address

    address: str = get_node_ip_address()  # type: ignore[no-untyped-call]
    return address


def _own_log() -> Path:
    """Ray's log file of this process, or where Ray keeps none (it rotates through a pipe) a new one."""
    path = Path(os.readlink("/proc/self/fd/2"))
    return path if path.is_file() else Path(tempfile.mkstemp(prefix="pdserve-", suffix=".log")[1])


def _redirect_output(log_path: Path) -> None:
    """From now on everything this process prints, native libraries included, goes to the member's log file."""
    with log_path.open("ab") as log:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
