"""Which roles this host has, as `ray start --resources` takes them.

Ray's launcher has one start command for all hosts of cluster/local.yaml, so each looks itself up in it:
`python -m cluster.host_roles prefill=HOST,HOST decode=HOST` prints, for example, {"prefill": 1}.
"""

from __future__ import annotations

import json
import socket
import sys
from collections import Counter

from common.config import Role


def main(arguments: list[str]) -> int:
    """Exit codes: 0 printed, 2 the arguments are wrong or name this host nowhere."""
    try:
        print(json.dumps(roles_of_this_host(arguments)))
    except ValueError as error:
        print(f"host_roles: {error}", file=sys.stderr)
        return 2
    return 0


def roles_of_this_host(arguments: list[str]) -> dict[str, int]:
    """How many workers of each role it takes: as many as it is named for.

    arguments: "ROLE=HOST,HOST,...", hosts by address or name. Raises: ValueError.
    """
    counted: Counter[str] = Counter()
    for argument in arguments:
        role, _, hosts = argument.partition("=")
        counted[Role(role).value] += sum(is_this_host(host) for host in hosts.split(","))
    roles = {role: count for role, count in counted.items() if count}
    if not roles:
        raise ValueError(f"{socket.gethostname()} has no address of those in: {' '.join(arguments)}")
    return roles


def is_this_host(host: str) -> bool:
    """Whether it is an address of this machine, or a name of one. A name that is not known here is not ours."""
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
