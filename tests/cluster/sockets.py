"""What the processes of a deployment listen on, as the kernel tells it."""

from __future__ import annotations

import ipaddress
import os
import struct
from pathlib import Path

from tests.cluster.pdserve_process import all_pids, parent_of

LISTEN = "0A"


def family_of(pid: int) -> list[int]:
    """A process and all that descend from it."""
    children = {pid}
    pids = all_pids()
    while grown := {other for other in pids if parent_of(other) in children} - children:
        children |= grown
    return sorted(children)


def listening(pids: list[int]) -> dict[tuple[str, int], int]:
    """(address, port) → pid, over IPv4 and IPv6."""
    owners = {inode: pid for pid in pids for inode in _socket_inodes(pid)}
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pids[0]}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == LISTEN and inode in owners:
                address, _, port = local.partition(":")
                found[_address(address), int(port, 16)] = owners[inode]
    return found


def _socket_inodes(pid: int) -> list[str]:
    inodes = []
    try:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(descriptor)
            if target.startswith("socket:["):
                inodes.append(target[len("socket:[") : -1])
    except OSError:  # it ends, or closes one of them, meanwhile
        pass
    return inodes


def _address(hexadecimal: str) -> str:
    """The kernel writes each 32-bit word in the byte order of the machine."""
    words = [int(hexadecimal[start : start + 8], 16) for start in range(0, len(hexadecimal), 8)]
    address = ipaddress.ip_address(struct.pack(f"={len(words)}I", *words))
    mapped = address.ipv4_mapped if address.version == 6 else None  # an IPv6 socket on an IPv4 address
    return str(mapped or address)
