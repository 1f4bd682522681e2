"""Hosts members as Ray actors: on a Ray of our own on this machine, or spread over a running cluster.

Ray only places processes. Requests, tokens and KV never pass through it, and restarting is the supervisor's business
(max_restarts=0), so a death is handled as it is for local processes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any

from cluster.host import HostError, MemberSpec, Patience
from cluster.plan import Plan, with_free_ports
from cluster.ray_actor import MemberActor, MemberOrder
from cluster.ray_lookup import router_options
from cluster.ray_member import MemberTerms, RayMember
from cluster.ray_placement import Needs, Placement, as_options, until_nodes_joined
from cluster.ray_session import LOCAL, join_ray, local_ray
from common.config import Role

_STOP_MARGIN_S = 10.0


def start_ray(address: str, plan: Plan, logs: Path, doing: Callable[[str], None]) -> tuple[Plan, RayHost]:
    """Start a Ray of our own (address "local") or join the cluster at `address`.

    doing: is told what is being waited for. Returns the plan with the addresses that this deployment will really use.
    Raises: ConfigError.
    """
    with ExitStack() as stack:
        # Ray prints its opinion of every death to our stdout, whatever it is told.
        stack.enter_context(redirect_stdout(stack.enter_context((logs / "ray.log").open("a"))))
        if address == LOCAL:
            ray = local_ray(len(plan.worker_names), stack)
        else:
            ray = join_ray(address, stack)
            plan = plan.on_network(ray.util.get_node_ip_address())
            until_nodes_joined(ray, [role for role in Role if plan.config.pool(role).replicas], doing)
        plan = with_free_ports(plan)
        return plan, RayHost(ray, plan, Placement.over(ray, is_spread=address != LOCAL), logs, stack.pop_all())


class RayHost:
    def __init__(self, ray: Any, plan: Plan, placement: Placement, logs: Path, held: ExitStack) -> None:
        self._ray = ray
        self._plan = plan
        self._placement = placement
        self._logs = logs
        self._secret = plan.config.cluster_secret()  # other nodes have no such file
        self._patience = Patience()
        self._held = held  # what must be released at the end, Ray itself included

    async def start(self, spec: MemberSpec) -> RayMember:
        plan, log_path = self._plan, self._logs / f"{spec.name}.log"
        is_here = spec.role is None or not self._placement.is_spread
        order = MemberOrder(
            spec, plan.config, plan.control_addresses, log_path if is_here else None, self._placement.is_spread
        )
        if spec.role is None:
            needs: Needs = {}
            options = self._on_this_node() | router_options(spec, plan)
        else:
            self._placement = self._placement.seen_again(self._ray)
            needs = self._placement.needs(spec.role, plan.config)
            options = as_options(needs)
        try:
            new_actor = self._ray.remote(MemberActor).options(max_restarts=0, max_concurrency=8, **options).remote
            actor = new_actor(order, b"" if spec.role is None else self._secret)
        except (self._ray.exceptions.RayError, ValueError) as error:  # ValueError: its predecessor still has the name
            raise HostError(f"Ray cannot start {spec.name}: {error}") from error
        terms = MemberTerms(needs, log_path, plan.longest_drain_s + _STOP_MARGIN_S, self._patience)
        return RayMember(self._ray, actor, terms)

    def hurry(self) -> None:
        self._patience.end()

    async def close(self) -> None:
        self._held.close()

    def _on_this_node(self) -> dict[str, Any]:
        """The router stays where `pdserve up` runs: its URLs are the ones that were announced."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        node_id = self._ray.get_runtime_context().get_node_id()
        return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False)}
