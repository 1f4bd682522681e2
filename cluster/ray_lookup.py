"""A deployment on a Ray cluster is found by the names of its routers' actors, from any node of the cluster."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any

from cluster.host import MemberSpec
from cluster.plan import Plan
from cluster.ray_session import join_ray
from cluster.running import RunningDeployment
from common.errors import ConfigError, WorkerUnavailable

NAMESPACE = "pdserve"
FIND_S = 5.0  # for a router that is just being started again
LOOK_S = 0.2
CALL_S = 10.0


def router_options(spec: MemberSpec, plan: Plan) -> dict[str, Any]:
    """The name is gone as soon as the router is, so none is ever stale. Several deployments may share a cluster."""
    return {"name": f"{spec.name}@{plan.control_address}", "namespace": NAMESPACE}


def find_on_ray(address: str, router: str | None) -> RunningDeployment:
    """address: of the Ray cluster, "auto" or HOST:PORT. router: the control address of the one that is meant.

    Raises: ConfigError when there is no such cluster, or several deployments on it; WorkerUnavailable when none.
    """
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(stack.enter_context(Path(os.devnull).open("w"))))
        ray = join_ray(address, stack)
        name = _find_name(ray, router)
        actor = ray.get_actor(name, namespace=NAMESPACE)
        try:
            found: RunningDeployment = ray.get(actor.deployment.remote(), timeout=CALL_S)
        except ray.exceptions.RayError as error:
            raise WorkerUnavailable(f"{name} does not answer on Ray: {error}") from error
    return found


def _find_name(ray: Any, router: str | None) -> str:
    deadline_s = time.monotonic() + FIND_S
    while not (by_address := _routers(ray, router)):
        if time.monotonic() >= deadline_s:
            where = "" if router is None else f" at {router}"
            raise WorkerUnavailable(f"no router of pdserve runs on this Ray cluster{where}")
        time.sleep(LOOK_S)
    if len(by_address) > 1:
        choices = " or ".join(by_address)
        raise ConfigError(f"several deployments share this Ray cluster: choose one with --router {choices}")
    return next(iter(by_address.values()))


def _routers(ray: Any, wanted: str | None) -> dict[str, str]:
    """One router's name for each deployment, by the control address that stands in it."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    names = sorted(actor["name"] for actor in actors if actor["namespace"] == NAMESPACE)
    by_address = {name.partition("@")[2]: name for name in names}
    return {address: name for address, name in by_address.items() if wanted in (None, address)}
