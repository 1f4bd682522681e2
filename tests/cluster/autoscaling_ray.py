"""A Ray cluster with Ray's own autoscaler, whose machines are further nodes on this one.

`python -m tests.cluster.autoscaling_ray FOLDER` prints the address once a node of each role is there, and ends it all
when its stdin ends. A process of its own, for Ray keeps globals.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from tests.cluster.pdserve_process import is_alive
from tests.cluster.sockets import family_of

ROLES = ("prefill", "decode")
START_S = 60.0
END_S = 40.0
HEAD_TYPE = "ray.head.default"  # as Ray's provider of such machines calls it
UNUSED = ("file_mounts", "docker", "auth")
UNUSED_LISTS = (
    *("cluster_synced_files", "rsync_exclude", "rsync_filter", "initialization_commands"),
    *("setup_commands", "head_setup_commands", "worker_setup_commands"),
    *("head_start_ray_commands", "worker_start_ray_commands"),
)


def cluster_config(gcs_address: str) -> dict[str, object]:
    """One node of each role, two at most; one that is idle goes after three seconds."""
    workers = {
        role: {"resources": {"CPU": 1, role: 1}, "node_config": {}, "min_workers": 1, "max_workers": 2}
        for role in ROLES
    }
    head = {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0}
    return {
        "cluster_name": "test",
        "max_workers": 4,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 0.05,
        "provider": {
            "type": "fake_multinode",
            "gcs_address": gcs_address,
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "head_node_type": HEAD_TYPE,
        "available_node_types": {HEAD_TYPE: head, **workers},
        "file_mounts_sync_continuously": False,
        **{key: {} for key in UNUSED},
        **{key: [] for key in UNUSED_LISTS},
    }


def start_head(folder: Path, address: str) -> subprocess.Popen[bytes]:
    config = folder / "cluster.json"
    config.write_text(json.dumps(cluster_config(address)))
    settings = {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_enable_autoscaler_v2": "0"}
    ray = str(Path(sys.executable).parent / "ray")
    options = {
        "port": address.rpartition(":")[2],
        "num-cpus": 1,
        "include-dashboard": "false",
        "object-store-memory": 100 << 20,
        "temp-dir": folder,
        "autoscaling-config": config,
    }
    command = [ray, "start", "--head", "--block", *(f"--{name}={value}" for name, value in options.items())]
    return subprocess.Popen(command, env=os.environ | settings, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def wait_for_nodes(address: str) -> None:
    import ray

    deadline_s = time.monotonic() + START_S
    ray.init(address=address, log_to_driver=False)
    while not set(ROLES) <= set(ray.cluster_resources()):
        assert time.monotonic() < deadline_s, "the autoscaler has not started the nodes that it must always have"
        time.sleep(0.5)
    ray.shutdown()


def end(head: subprocess.Popen[bytes]) -> None:
    family = family_of(head.pid)
    head.terminate()
    with suppress(subprocess.TimeoutExpired):
        head.wait(END_S)
    for pid in family:  # what the autoscaler had started is not the head's to end
        if is_alive(pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    head.wait(END_S)


def main() -> None:
    import ray

    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"
    head = start_head(Path(sys.argv[1]), address)
    try:
        time.sleep(2)  # it listens
        wait_for_nodes(address)
        print("address", address, flush=True)
        sys.stdin.read()
    finally:
        end(head)


if __name__ == "__main__":
    main()
