"""The configurations that are compared: the same two workers, told apart by who computes prompts."""

from __future__ import annotations

from typing import Literal, get_args

from cluster.plan import Overrides, Plan, available_cores, make_plan, with_free_ports
from common.config import Role, ServeConfig
from servingbench.system import quiet

Configuration = Literal["auto", "always", "never", "colocated"]
CONFIGURATIONS: tuple[Configuration, ...] = get_args(Configuration)
PAIR = {Role.PREFILL: 1, Role.DECODE: 1, Role.COLOCATED: 0}
TWO_COLOCATED = {Role.PREFILL: 0, Role.DECODE: 0, Role.COLOCATED: 2}


def plan_for(configuration: Configuration, config: ServeConfig, max_ttft_s: float | None) -> Plan:
    """max_ttft_s: what is predicted to come later is refused. Raises: ConfigError."""
    config = quiet(config)
    slo = config.slo.model_copy(update={"ttft_s": max_ttft_s})
    if configuration == "colocated":
        changed = config.model_copy(update={"slo": slo})
        return with_free_ports(make_plan(changed, Overrides(TWO_COLOCATED), available_cores()))
    router = config.router.model_copy(update={"disaggregation": configuration})
    changed = config.model_copy(update={"slo": slo, "router": router})
    return with_free_ports(make_plan(changed, Overrides(PAIR), available_cores()))
