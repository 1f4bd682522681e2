"""Finds a running deployment for the commands that ask it something: its control address, and what it asks for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.plan import LOOPBACK, Plan
from cluster.up import CONFIG_NAME, living_runs
from common.cluster_access import ClusterAccess
from common.config import ServeConfig, load_config
from common.errors import ConfigError


@dataclass(frozen=True)
class RunningDeployment:
    control_address: str
    access: ClusterAccess
    is_asked_for: bool = True  # somebody said where; else it is where a deployment would be by default


def find_running(config: ServeConfig, address: str | None, log_folder: Path | None) -> RunningDeployment:
    """log_folder: of its `pdserve up --logs`; it decides if given. address: of its control port; None: the config's.

    What no config names is as in this user's run that has that port: its secret, and the host to which `--address`
    moved the port. Raises: ConfigError.
    """
    if log_folder is not None:
        config = load_config(log_folder / CONFIG_NAME)
    is_named = address is not None or log_folder is not None
    is_elsewhere = config.router.control_host != LOOPBACK
    address = address or Plan(config).control_address
    access = config.security.cluster_access()
    run = next(_runs_at(int(address.rpartition(":")[2])), None)
    if run is not None and not is_named and not is_elsewhere:
        address = Plan(run.config).control_address
    if run is not None and not access.secret:
        access = replace(access, secret=run.secret)
    return RunningDeployment(address, access, is_named)


@dataclass(frozen=True)
class _Run:
    config: ServeConfig
    secret: bytes


def _runs_at(control_port: int) -> Iterator[_Run]:
    for run in living_runs():
        try:
            config = load_config(run / CONFIG_NAME)
            if control_port in {int(address.rpartition(":")[2]) for address in Plan(config).control_addresses}:
                yield _Run(config, config.cluster_secret())
        except ConfigError:  # it is just starting or ending
            continue
