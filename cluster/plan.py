"""What `pdserve up` is about to start: the config with the command line applied, the members, and free ports."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from cluster.host import AdminPorts, MemberSpec
from common.config import Role, ServeConfig
from common.errors import ConfigError

LOOPBACK = "127.0.0.1"
PUBLIC_PORTS = ("http_port", "grpc_port")  # on router.host; the others are on router.control_host
MAX_WORKERS = 1024
MAX_WORKERS_PER_CORE, ALWAYS_ALLOWED = 4, 16  # on one machine


@dataclass(frozen=True)
class Overrides:
    """What the command line says in place of serve.yaml; None leaves the file's value."""

    replicas: Mapping[Role, int | None] = field(default_factory=dict)
    ports: Mapping[str, int | None] = field(default_factory=dict)  # by key of the router section
    router_processes: int | None = None


@dataclass(frozen=True)
class SharedCores:
    """Of a machine, among the workers of the roles for which nobody has named a num_threads."""

    num_cores: int
    roles: frozenset[Role]

    def share(self, role: Role, num_workers: int) -> int | None:
        """Threads of one worker among so many; None where a number was named."""
        return max(1, self.num_cores // num_workers) if role in self.roles else None


@dataclass(frozen=True)
class Plan:
    """A deployment that can be started: every port is a number, every pool has its threads."""

    config: ServeConfig
    admin_ports: tuple[AdminPorts, ...] = ()  # of each router process; none: as the config says
    shared_cores: SharedCores | None = None  # None: no workers of one machine share any

    @property
    def specs(self) -> list[MemberSpec]:
        """The routers first, then the workers."""
        workers = [MemberSpec(f"{role}-{i}", role) for role in Role for i in range(self.config.pool(role).replicas)]
        if self.config.router.processes == 1:
            return [MemberSpec("router", None), *workers]
        return [MemberSpec(f"router-{i}", None, port) for i, port in enumerate(self._admin_ports)] + workers

    @property
    def worker_names(self) -> list[str]:
        return [spec.name for spec in self.specs if spec.role is not None]

    @property
    def http_url(self) -> str:
        scheme = "http" if self.config.security.tls is None else "https"
        return f"{scheme}://{_reachable(self.config.router.host)}:{self.config.router.http_port}"

    @property
    def grpc_address(self) -> str:
        return f"{_reachable(self.config.router.host)}:{self.config.router.grpc_port}"

    @property
    def control_address(self) -> str:
        """The first router's; each of them knows all workers."""
        return self.control_addresses[0]

    @property
    def control_addresses(self) -> list[str]:
        return [f"{_reachable(self.config.router.control_host)}:{ports.control}" for ports in self._admin_ports]

    @property
    def dashboard_urls(self) -> list[str]:
        """Each router's, for /metrics is there too."""
        router = self.config.router
        if not router.has_metrics_port:
            return [f"{self.http_url}/dashboard"]
        return [f"http://{_reachable(router.control_host)}:{ports.metrics}/dashboard" for ports in self._admin_ports]

    @property
    def longest_drain_s(self) -> float:
        config = self.config
        return max(config.router.drain_timeout_s, *(config.pool(role).drain_timeout_s for role in Role))

    @property
    def _admin_ports(self) -> tuple[AdminPorts, ...]:
        router = self.config.router
        counted = [AdminPorts(router.control_port + i, router.metrics_port + i) for i in range(router.processes)]
        return self.admin_ports or tuple(counted)

    def added_worker(self, name: str, role: Role, num_workers: int) -> MemberSpec:
        """One that is added later, as one of `num_workers`. Those that run keep the threads that they have."""
        threads = None if self.shared_cores is None else self.shared_cores.share(role, num_workers)
        return MemberSpec(name, role, num_threads=threads)

    def on_network(self, node_address: str) -> Plan:
        """For members on several machines: they must reach the control port. Who may call the APIs is not changed."""
        if self.config.router.control_host != LOOPBACK:
            return self
        return replace(self, config=_updated(self.config, {"router": {"control_host": node_address}}))

    def with_secret_file(self, path: Path) -> Plan:
        return replace(self, config=_updated(self.config, {"security": {"secret_file": path}}))

    def write(self, path: Path) -> None:
        """The effective serve.yaml, which every process of this deployment reads."""
        path.write_text(yaml.safe_dump(self.config.model_dump(mode="json"), sort_keys=False), encoding="utf-8")


def make_plan(config: ServeConfig, overrides: Overrides, num_cores: int | None = None) -> Plan:
    """`num_cores`: shared among the workers that name no num_threads; None leaves that to each worker.

    Raises: ConfigError when nothing could ever be served.
    """
    chosen = {role: overrides.replicas.get(role) for role in Role}
    replicas = {role: config.pool(role).replicas if n is None else n for role, n in chosen.items()}
    require_servable(replicas, num_cores)
    unnamed = frozenset(role for role in Role if config.pool(role).num_threads is None)
    shared = None if num_cores is None else SharedCores(num_cores, unnamed)
    total = sum(replicas.values())
    threads = {role: config.pool(role).num_threads or (shared and shared.share(role, total)) for role in Role}
    changes: dict[str, Any] = {role: {"replicas": replicas[role], "num_threads": threads[role]} for role in Role}
    changes["router"] = {key: port for key, port in overrides.ports.items() if port is not None}
    if overrides.router_processes is not None:
        changes["router"]["processes"] = overrides.router_processes
    return Plan(_updated(config, changes), shared_cores=shared)


def require_servable(replicas: Mapping[Role, int], num_cores: int | None) -> None:
    """num_cores: of the one machine that they share; None: they have several.

    Raises: ConfigError when pools of these sizes could never serve a request, or not get anywhere with it.
    """
    total = sum(replicas.values())
    most = MAX_WORKERS if num_cores is None else max(ALWAYS_ALLOWED, MAX_WORKERS_PER_CORE * num_cores)
    if total > most:
        where = "one deployment" if num_cores is None else f"a machine with {num_cores} cores"
        raise ConfigError(f"{total} workers are too many for {where}: at most {most}")
    if not replicas[Role.COLOCATED] and not (replicas[Role.PREFILL] and replicas[Role.DECODE]):
        raise ConfigError(
            f"{replicas[Role.PREFILL]} prefill and {replicas[Role.DECODE]} decode workers cannot serve: "
            "start at least one of each, or one with --colocated"
        )


def with_free_ports(plan: Plan) -> Plan:
    """Ports given as 0 become free ones, all different. Raises: ConfigError naming the first port in use."""
    router = plan.config.router
    with ExitStack() as held:

        def free(key: str, host: str, index: int = 0) -> int:
            port: int = getattr(router, key)
            taken: int = held.enter_context(_bind(host, port and port + index, key)).getsockname()[1]
            return taken

        changes = {key: free(key, router.host) for key in PUBLIC_PORTS}
        admin = tuple(
            AdminPorts(
                free("control_port", router.control_host, index),
                free("metrics_port", router.control_host, index) if router.has_metrics_port else router.metrics_port,
            )
            for index in range(router.processes)
        )
    changes |= {"control_port": admin[0].control, "metrics_port": admin[0].metrics}
    return replace(plan, config=_updated(plan.config, {"router": changes}), admin_ports=admin)


def available_cores() -> int:
    return len(os.sched_getaffinity(0))


def _bind(host: str, port: int, key: str) -> socket.socket:
    """key: of the router section, for the message."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    probe = socket.socket(family, socket.SOCK_STREAM)
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was used a moment ago is free
    try:
        probe.bind((host, port))
        probe.listen(1)
    except (OSError, OverflowError) as error:
        probe.close()
        if isinstance(error, socket.gaierror) or (isinstance(error, OSError) and error.errno == errno.EADDRNOTAVAIL):
            host_key = "host" if key in PUBLIC_PORTS else "control_host"
            raise ConfigError(
                f"router.{host_key} is {host}, which is no address of this machine ({error.strerror})"
            ) from error
        reason = error.strerror if isinstance(error, OSError) else "there is no such port"
        option = f"--{key.replace('_', '-')}"
        raise ConfigError(
            f"cannot listen on {host}:{port} ({reason}): choose another router.{key}, "
            f"or give {option} N (0 picks a free one)"
        ) from error
    return probe


def _updated(config: ServeConfig, changes: dict[str, dict[str, Any]]) -> ServeConfig:
    sections = {name: getattr(config, name).model_copy(update=update) for name, update in changes.items()}
    return config.model_copy(update=sections)


def _reachable(host: str) -> str:
    """An address to call for a server that may listen on all of them."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
