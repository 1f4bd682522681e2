"""Hosts on the stage: a network, and on it machines with names, addresses, homes and SSH servers of their own.

They share the machine's programs and this checkout's .venv, as if everything had been installed on each before. What
they run is the copy of the code that was sent to each: PYTHONPATH says so to every SSH session.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rayproof.stage import HOME, UNSHARE, hide, run

NETWORK = "10.77.0"
GATEWAY = f"{NETWORK}.1"  # the stage itself, where `ray up` is typed
STATE = Path("/run/hosts")  # keys, and what they read to become hosts
SKELETON = Path("/etc/skel/.bashrc")  # what a new user's home has
SSH_READY_S = 20.0
UNSHARE_REST = tuple(flag for flag in UNSHARE if flag != "--net")  # `ip netns exec` does that


@dataclass(frozen=True)
class Host:
    name: str
    address: str


def make_network(hosts: Sequence[Host]) -> None:
    """One Ethernet without a way out. Ray finds its own address by its default route, so each host has one.

    The gateway says that there is nothing behind it: Ray asks for a cloud's metadata, and would wait for an answer.
    """
    for command in (
        "link set lo up",
        "link add lan type bridge",
        f"addr add {GATEWAY}/24 dev lan",
        "link set lan up",
        "route add unreachable default",
    ):
        run(["ip", *command.split()])
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    for host in hosts:
        for command in (
            f"netns add {host.name}",
            f"link add {host.name} type veth peer name eth0 netns {host.name}",
            f"link set {host.name} master lan up",
            f"-n {host.name} link set lo up",
            f"-n {host.name} addr add {host.address}/24 dev eth0",
            f"-n {host.name} link set eth0 up",
            f"-n {host.name} route add default via {GATEWAY}",
        ):
            run(["ip", *command.split()])


def make_key() -> None:
    """The pair of this stage's user, which every host will let in, and the hosts' own."""
    STATE.mkdir()
    (HOME / ".ssh").mkdir(mode=0o700)
    for path in (HOME / ".ssh/id_ed25519", STATE / "host_key"):
        run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)])
    shutil.copy(HOME / ".ssh/id_ed25519.pub", STATE / "authorized_keys")
    (HOME / ".ssh/known_hosts").write_text(f"{NETWORK}.* {(STATE / 'host_key.pub').read_text()}")
    (STATE / "sshd_config").write_text(
        f"HostKey {STATE}/host_key\nAuthorizedKeysFile {STATE}/authorized_keys\nPermitRootLogin prohibit-password\n"
        f"UsePAM no\nUseDNS no\nPrintLastLog no\nPidFile none\nStrictModes no\nSetEnv PYTHONPATH={HOME}/pdserve\n"
    )
    Path("/run/sshd").mkdir()


def start_hosts(hosts: Sequence[Host], program: Path, arguments: Sequence[str]) -> list[subprocess.Popen[bytes]]:
    """Each is a process that is all of its host: when it ends, everything on that host does.

    program: what calls `become_host` when started with `arguments` and a host's name.
    """
    processes = []
    for host in hosts:
        command = [*UNSHARE_REST, sys.executable, str(program), *arguments, "--host", host.name]
        processes.append(subprocess.Popen(["ip", "netns", "exec", host.name, *command]))
    deadline_s = time.monotonic() + SSH_READY_S
    for host in hosts:
        while not _answers(host.address, 22):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"no SSH server at {host.name}")
            time.sleep(0.05)
    return processes


def become_host(name: str, kept: Sequence[Path]) -> None:
    """Does not return: this process, the first one of its namespaces, becomes the host's SSH server."""
    hide(kept)
    socket.sethostname(name)
    _install(HOME / "pdserve/.venv")
    if SKELETON.exists():
        shutil.copy(SKELETON, HOME)
    os.chdir("/")
    sshd = shutil.which("sshd")
    assert sshd is not None, "stage.missing() has looked for it"
    os.execv(sshd, [sshd, "-D", "-e", "-q", "-f", str(STATE / "sshd_config")])


def _install(venv: Path) -> None:
    """As `make install` leaves it, by reference. It is older than no file that Make compares it with."""
    venv.mkdir(parents=True)
    for entry in ("bin", "lib", "pyvenv.cfg"):
        (venv / entry).symlink_to(Path(sys.prefix) / entry)
    (venv / ".installed").touch()


def _answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), 1.0).close()
    except OSError:
        return False
    return True
