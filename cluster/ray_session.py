"""Starting a Ray of our own, or joining one that runs: quietly, and with an end to every wait."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import socket
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from common.errors import ConfigError

LOCAL = "local"
_OBJECT_STORE_BYTES = 128 << 20  # nothing of ours goes through it
_CONNECT_TIMEOUT_S = 3.0


def local_ray(num_cpus: int, stack: ExitStack) -> Any:
    """The ray module, with a Ray on this machine alone; `stack` ends it."""
    scratch = Path(tempfile.mkdtemp(prefix="pdserve-", dir="/tmp"))  # short: Ray puts unix sockets below it
    stack.callback(shutil.rmtree, scratch, ignore_errors=True)
    # Ray's own services listen to everybody, and whoever may call them may run code here
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    return _init_ray(
        stack,
        num_cpus=num_cpus,
        object_store_memory=_OBJECT_STORE_BYTES,
        include_dashboard=False,
        _temp_dir=str(scratch),
    )


def join_ray(address: str, stack: ExitStack) -> Any:
    """The ray module, in the cluster at `address`: "auto" or HOST:PORT. `stack` leaves it.

    Raises: ConfigError when none answers there.
    """
    if address.startswith("ray://"):
        raise ConfigError("--address takes 'auto' or HOST:PORT: run pdserve on a node of the cluster")
    if address != "auto":
        _require_reachable(address)
    return _init_ray(stack, address=address)


def _require_reachable(address: str) -> None:
    """Ray itself would try for many minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"--address takes 'auto' or HOST:PORT, not {address!r}")
    try:
        socket.create_connection((host, int(port)), _CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"no Ray cluster answers at {address}: {error}") from error


def _init_ray(stack: ExitStack, **options: Any) -> Any:
    """Its settings are read at import, hence the order.

    The authentication mode is always explicit: left unset, a local start writes a token file into the home folder.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    import ray

    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
    except (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise ConfigError(f"cannot start or join Ray: {str(error).strip().splitlines()[0]}") from error
    stack.callback(ray.shutdown)
    return ray
