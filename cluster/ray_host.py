"""Hosts members as Ray actors: on a Ray of our own on this machine, or spread over a running cluster.

Ray only places processes. Requests, tokens and KV never pass through it, and restarting is the supervisor's business
(max_restarts=0), so a death is handled as it is for local processes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.host import Ending, HostError, MemberSpec
from cluster.plan import Plan, with_free_ports
from cluster.processes import last_words
from cluster.ray_actor import LEFT, MemberActor, MemberOrder
from common.config import Role, ServeConfig
from common.errors import ConfigError

LOCAL = "local"
_OBJECT_STORE_BYTES = 128 << 20  # nothing of ours goes through it
_STOP_TIMEOUT_S = 10.0
_CONNECT_TIMEOUT_S = 3.0
_ROLES_LABEL = "pdserve-roles"  # on a head that Ray's launcher started: roles, joined by dots, that nodes will join for
_NODES_TIMEOUT_S = 1800.0  # a cloud's machine boots, and installs gigabytes


def start_ray(address: str, plan: Plan, logs: Path, doing: Callable[[str], None]) -> tuple[Plan, RayHost]:
    """Start a Ray of our own (address "local") or join the cluster at `address`.

    doing: is told what is being waited for. Returns the plan with the addresses that this deployment will really use.
    Raises: ConfigError.
    """
    if address.startswith("ray://"):
        raise ConfigError("--address takes 'auto' or HOST:PORT: run pdserve up on a node of the cluster")
    if address not in (LOCAL, "auto"):
        _require_reachable(address)
    with ExitStack() as stack:
        # Ray prints its opinion of every death to our stdout, whatever it is told.
        stack.enter_context(redirect_stdout(stack.enter_context((logs / "ray.log").open("a"))))
        ray = _local_ray(plan, stack) if address == LOCAL else _init_ray("token", address=address)
        stack.callback(ray.shutdown)
        if address != LOCAL:
            plan = plan.on_network(ray.util.get_node_ip_address())
            _until_nodes_joined(ray, plan.config, doing)
        plan = with_free_ports(plan)
        return plan, RayHost(ray, plan, Placement.over(ray, is_spread=address != LOCAL), logs, stack.pop_all())


@dataclass(frozen=True)
class Placement:
    """Which nodes a worker may run on."""

    role_resources: frozenset[str]  # roles that some node advertises as a custom resource
    has_gpus: bool
    is_spread: bool  # over several machines

    @staticmethod
    def over(ray: Any, is_spread: bool) -> Placement:
        resources = frozenset(ray.cluster_resources())
        return Placement(resources & {str(role) for role in Role}, "GPU" in resources, is_spread)

    def options(self, role: Role, config: ServeConfig) -> dict[str, Any]:
        """What an actor of this role asks Ray for."""
        wants_gpu = self.has_gpus and config.pool(role).device != "cpu"
        resources = {str(role): 1} if role in self.role_resources else {}
        return {"num_cpus": 1, "num_gpus": int(wants_gpu), "resources": resources}


class RayHost:
    def __init__(self, ray: Any, plan: Plan, placement: Placement, logs: Path, held: ExitStack) -> None:
        self._ray = ray
        self._plan = plan
        self._placement = placement
        self._logs = logs
        self._secret = plan.config.cluster_secret()  # other nodes have no such file
        self._held = held  # what must be released at the end, Ray itself included

    async def start(self, spec: MemberSpec) -> RayMember:
        is_here = spec.role is None or not self._placement.is_spread
        log_path = self._logs / f"{spec.name}.log" if is_here else None
        order = MemberOrder(spec, self._plan.config, self._plan.control_addresses, log_path, self._placement.is_spread)
        options = self._on_this_node() if spec.role is None else self._placement.options(spec.role, self._plan.config)
        try:
            new_actor = self._ray.remote(MemberActor).options(max_restarts=0, max_concurrency=8, **options).remote
            actor = new_actor(b"" if spec.role is None else self._secret)
            return RayMember(self._ray, actor, order, self._plan.longest_drain_s + _STOP_TIMEOUT_S)
        except self._ray.exceptions.RayError as error:
            raise HostError(f"Ray cannot start {spec.name}: {error}") from error

    async def close(self) -> None:
        self._held.close()

    def _on_this_node(self) -> dict[str, Any]:
        """The router stays where `pdserve up` runs: its URLs are the ones that were announced."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        node_id = self._ray.get_runtime_context().get_node_id()
        return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False)}


class RayMember:
    def __init__(self, ray: Any, actor: Any, order: MemberOrder, stop_timeout_s: float) -> None:
        self._stop_timeout_s = stop_timeout_s
        self._ray = ray
        self._actor = actor
        self._log_path = order.log_path
        self._log_start = order.log_path.stat().st_size if order.log_path and order.log_path.exists() else 0
        self._life = asyncio.ensure_future(_until_end(ray, actor.serve.remote(order)))

    async def ended(self) -> Ending:
        ending = await asyncio.shield(self._life)
        if ending.last_words or self._log_path is None or not self._log_path.exists():
            return ending
        return Ending(ending.reason, last_words(self._log_path, self._log_start), ending.is_config_error)

    async def stop(self) -> None:
        errors = self._ray.exceptions
        with suppress(TimeoutError, errors.RayActorError, errors.RayTaskError):
            await asyncio.wait_for(_result(self._actor.stop.remote()), self._stop_timeout_s)
        self._ray.kill(self._actor, no_restart=True)
        await asyncio.wait({self._life}, timeout=_STOP_TIMEOUT_S)
        self._life.cancel()


def _until_nodes_joined(ray: Any, config: ServeConfig, doing: Callable[[str], None]) -> None:
    """Wait for one node of each role that the head has announced and this deployment wants.

    `ray up` returns when the head is there. Whoever placed workers then would find no node of their role, and no GPU.
    Raises: ConfigError.
    """
    announced = {role for node in ray.nodes() for role in node["Labels"].get(_ROLES_LABEL, "").split(".")}
    wanted = sorted(str(role) for role in Role if config.pool(role).replicas and role in announced)
    deadline_s = time.monotonic() + _NODES_TIMEOUT_S
    while missing := [role for role in wanted if role not in ray.cluster_resources()]:
        what = f"a host for {' and one for '.join(missing)}"
        if time.monotonic() > deadline_s:
            raise ConfigError(f"waited in vain for {what}: /tmp/ray/session_latest/logs/monitor.* on the head say why")
        doing(f"waiting for {what}")
        time.sleep(0.5)


async def _until_end(ray: Any, serving: Any) -> Ending:
    try:
        reason = await _result(serving)
        return Ending(reason, has_left=reason == LEFT)
    except ray.exceptions.RayActorError as error:
        last_line = str(error).strip().splitlines()[-1].strip()
        return Ending(last_line.partition(". ")[0])  # the rest is a page of guesses
    except ray.exceptions.RayTaskError as error:
        return Ending(f"raised {type(error.cause).__name__}", str(error.cause), isinstance(error.cause, ConfigError))


async def _result(reference: Any) -> Any:
    return await reference


def _require_reachable(address: str) -> None:
    """Ray itself would try for many minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"--address takes 'auto' or HOST:PORT, not {address!r}")
    try:
        socket.create_connection((host, int(port)), _CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"no Ray cluster answers at {address}: {error}") from error


def _local_ray(plan: Plan, stack: ExitStack) -> Any:
    scratch = Path(tempfile.mkdtemp(prefix="pdserve-", dir="/tmp"))  # short: Ray puts unix sockets below it
    stack.callback(shutil.rmtree, scratch, ignore_errors=True)
    # Ray's own services listen to everybody, and whoever may call them may run code here
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    return _init_ray(
        "token",
        num_cpus=len(plan.worker_names),
        object_store_memory=_OBJECT_STORE_BYTES,
        include_dashboard=False,
        _temp_dir=str(scratch),
    )


def _init_ray(auth_mode: str, **options: Any) -> Any:
    """Import and start or join Ray, quietly. Its settings are read at import, hence the order.

    The authentication mode is always explicit: left unset, a local start writes a token file into the home folder.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_AUTH_MODE", auth_mode)
    import ray

    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
    except (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise ConfigError(f"cannot start or join Ray: {str(error).strip().splitlines()[0]}") from error
    return ray
