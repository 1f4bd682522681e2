"""README's "On several machines", done for real on this one: three hosts, `ray up`, a prompt served across two of them.

python scripts/ray_up_proof.py                     as shipped, with the built-in model
python scripts/ray_up_proof.py --config FILE       another serve.yaml

The hosts are network namespaces with their own processes, homes and SSH servers. It needs root, and Debian's iproute2,
util-linux, openssh-server, rsync and make. Nothing that it does is seen outside of its namespaces, and all of it ends
with this process, whatever ends it.

Exit status: 0 proven, 1 not, 2 it cannot be tried here, 128 + a signal that ended it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx

from common.config import load_config
from common.errors import ServingError
from common.model_source import resolve_model
from rayproof.commands import ROOT, Hosts, ProofFailed, edit_launcher_file, prove, replace_file, say
from rayproof.hosts import STATE, Host, become_host, make_key, make_network, start_hosts
from rayproof.stage import HOME, furnish, missing, play
from rayproof.terminal import CommandFailed

PROGRAM = Path(__file__).resolve()
SHIPPED = ROOT / "serve.yaml"
HOSTS = Hosts(Host("head", "10.77.0.10"), Host("prefill", "10.77.0.11"), Host("decode", "10.77.0.12"))
ALL = (HOSTS.head, HOSTS.prefill, HOSTS.decode)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    config = options.config.resolve()
    if options.host is not None:
        become_host(options.host, _kept(config))
    if options.on_stage:
        return _on_stage(config)
    if reason := missing():
        print(f"ray_up_proof: {reason}", file=sys.stderr)
        return 2
    try:
        resolve_model(load_config(config).model.source)  # the hosts have no way out to fetch one
    except ServingError as error:
        print(f"ray_up_proof: {error}", file=sys.stderr)
        return 2
    return play(PROGRAM, ["--on-stage", "--config", str(config)])


def _on_stage(config: Path) -> int:
    furnish(_kept(config))
    make_key()
    make_network(ALL)
    edit_launcher_file(HOSTS, STATE)
    if config != SHIPPED:
        replace_file(SHIPPED, config)
    start_hosts(ALL, PROGRAM, ["--config", str(config)])
    say(f"hosts: {', '.join(f'{host.name} {host.address}' for host in ALL)}")
    try:
        prove(HOSTS)
    except (ProofFailed, CommandFailed, httpx.HTTPError) as error:
        print(f"ray_up_proof: {error}", file=sys.stderr)
        return 1
    say("proven")
    return 0


def _kept(config: Path) -> list[Path]:
    """What must be there although hosts have empty homes and no common /tmp."""
    python = [Path(sys.prefix), Path(sys.base_prefix)]
    source = Path(load_config(config).model.source).expanduser().resolve()
    model = [source] if source.exists() else []
    return [ROOT, *python, config, *model, HOME / ".cache/pdserve"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Prove `ray up cluster/local.yaml` on this machine.")
    parser.add_argument("--config", type=Path, default=SHIPPED, help="serve.yaml in place of the shipped one")
    parser.add_argument("--on-stage", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--host", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
