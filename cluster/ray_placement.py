"""What a member asks Ray for, so that it comes to a node of its role, and what to say when there is none for it.

A member that finds no place stays with Ray as pending demand. That is what Ray's autoscaler, where there is one, starts
nodes for; and it goes with the member, also when `pdserve up` is killed, which `request_resources` would outlive.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from common.config import Role, ServeConfig
from common.errors import ConfigError

ROLES_LABEL = "pdserve-roles"  # on a head that Ray's launcher started: roles, joined by dots, that nodes will join for
JOIN_TIMEOUT_S = 1800.0  # a cloud's machine boots, and installs gigabytes
JOIN_POLL_S = 0.5
Needs = Mapping[str, float]  # amounts by resource, as Ray names them


@dataclass(frozen=True)
class Placement:
    """Which nodes a worker may run on."""

    role_resources: frozenset[str]  # roles that some node has advertised as a custom resource
    has_gpus: bool
    is_spread: bool  # over several machines

    @staticmethod
    def over(ray: Any, is_spread: bool) -> Placement:
        return Placement(frozenset(), False, is_spread).seen_again(ray)

    def seen_again(self, ray: Any) -> Placement:
        """With the nodes that have come. A role whose last node has gone waits for another one of its kind."""
        there = frozenset(ray.cluster_resources())
        roles = self.role_resources | (there & {str(role) for role in Role})
        return replace(self, role_resources=roles, has_gpus=self.has_gpus or "GPU" in there)

    def needs(self, role: Role, config: ServeConfig) -> Needs:
        """Alone on its machine, Ray need not count the CPUs: `pdserve` has shared them out."""
        needs: dict[str, float] = {"CPU": 1} if self.is_spread else {}
        if self.has_gpus and config.pool(role).device != "cpu":
            needs["GPU"] = 1
        if role in self.role_resources:
            needs[str(role)] = 1
        return needs


def as_options(needs: Needs) -> dict[str, Any]:
    """Of a Ray actor."""
    custom = {name: amount for name, amount in needs.items() if name not in ("CPU", "GPU")}
    return {"num_cpus": needs.get("CPU", 0), "num_gpus": needs.get("GPU", 0), "resources": custom}


def until_nodes_joined(ray: Any, roles: Sequence[Role], doing: Callable[[str], None]) -> None:
    """Wait for one node of each of the roles that the head has announced; doing: is told for which.

    `ray up` returns when the head is there. Whoever placed workers then would know of no node of their role, or a GPU.
    Raises: ConfigError.
    """
    announced = {role for node in ray.nodes() for role in node["Labels"].get(ROLES_LABEL, "").split(".")}
    wanted = [str(role) for role in roles if role in announced]
    deadline_s = time.monotonic() + JOIN_TIMEOUT_S
    while missing := [role for role in wanted if role not in ray.cluster_resources()]:
        what = f"a host for {' and one for '.join(missing)}"
        if time.monotonic() > deadline_s:
            raise ConfigError(f"waited in vain for {what}: /tmp/ray/session_latest/logs/monitor.* on the head say why")
        doing(f"waiting for {what}")
        time.sleep(JOIN_POLL_S)


def shortage(ray: Any, needs: Needs) -> str:
    """Why Ray has found no place for a member yet, in words that follow its name; empty if it has."""
    from ray.autoscaler.v2.sdk import get_cluster_status

    status = get_cluster_status(ray.get_runtime_context().gcs_address)
    pending = [
        shape.bundle for demand in status.resource_demands.ray_task_actor_demand for shape in demand.bundles_by_count
    ]
    if dict(needs) not in pending:
        return ""
    total, free = ray.cluster_resources(), ray.available_resources()
    scarce = [name for name, amount in needs.items() if free.get(name, 0) < amount]
    lacks = [f"{name} (the cluster has {total.get(name, 0):g}, free: {free.get(name, 0):g})" for name in scarce]
    wanted = " and ".join(f"{amount:g} {name}" for name, amount in needs.items())
    return (
        f"waits for a node with {wanted}: {', '.join(lacks) or 'no single one has all of it free'}. "
        "Ray's autoscaler is asked for one where it runs; otherwise add one by hand"
    )
