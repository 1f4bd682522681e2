"""Finds a running deployment for the commands that ask it something: its control address, and what it asks for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from cluster.plan import Plan
from cluster.up import CONFIG_NAME, living_runs
from common.cluster_access import ClusterAccess
from common.config import ServeConfig, load_config
from common.errors import ConfigError


@dataclass(frozen=True)
class RunningDeployment:
    control_address: str
    access: ClusterAccess


def find_running(config: ServeConfig, address: str | None, log_folder: Path | None) -> RunningDeployment:
    """log_folder: of its `pdserve up --logs`; it decides if given. address: of its control port; None: the config's.

    A secret that no config names is the one of this user's run that has that port.
    Raises: ConfigError.
    """
    if log_folder is not None:
        config = load_config(log_folder / CONFIG_NAME)
    address = address or Plan(config).control_address
    access = config.security.cluster_access()
    if not access.secret:
        access = replace(access, secret=_secret_of_run_at(int(address.rpartition(":")[2])))
    return RunningDeployment(address, access)


def _secret_of_run_at(control_port: int) -> bytes:
    for run in living_runs():
        try:
            config = load_config(run / CONFIG_NAME)
            if config.router.control_port == control_port:
                return config.cluster_secret()
        except ConfigError:  # it is just starting or ending
            continue
    return b""
