"""The pdserve command. Mistakes end with one line that says what to change, and exit code 2."""

from __future__ import annotations

import argparse
import math
import signal
import sys
from pathlib import Path
from types import FrameType

from rich.console import Console

from cluster.commands import COMMANDS, DEFAULT_CONFIG, PORTS
from cluster.supervisor import MemberGivenUp
from common.config import Role
from common.errors import ConfigError, ServingError

SCALE_TIMEOUT_S = 600.0  # a cloud takes minutes to start a machine, and a worker to load a large model


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 done or stopped on request, 1 it does not serve, 2 the command or the config is wrong."""
    arguments = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _exit_on_signal)  # until the event loop takes over
    console = Console(file=sys.stdout)  # this very stream, whatever a library makes of sys.stdout later
    try:
        return COMMANDS[arguments.command](arguments, console)
    except ConfigError as error:
        _complain(error)
        return 2
    except (MemberGivenUp, ServingError) as error:
        _complain(error)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pdserve", description="Disaggregated prefill/decode serving.")
    commands = parser.add_subparsers(dest="command", required=True)

    serving = argparse.ArgumentParser(add_help=False)
    serving.add_argument("--config", type=Path, help=f"default: {DEFAULT_CONFIG} here, else the built-in settings")
    for role in Role:
        serving.add_argument(f"--{role}", type=_count, metavar="N", help=f"number of {role} workers")
    for name in PORTS:
        serving.add_argument(f"--{name.replace('_', '-')}", type=_port, metavar="N", help="0 picks a free one")
    serving.add_argument("--router-processes", type=_positive, metavar="N", help="that share the public ports")
    serving.add_argument("--logs", type=Path, metavar="FOLDER", help="where the members' log files go")
    hosts = serving.add_mutually_exclusive_group()
    hosts.add_argument("--ray", action="store_true", help="host the members as actors of a local Ray")
    hosts.add_argument("--address", help="host the members on a running Ray cluster: 'auto' or HOST:PORT")

    commands.add_parser("up", parents=[serving], help="serve until Ctrl-C")
    show = commands.add_parser("demo", parents=[serving], help="serve one prompt, show where its time went, stop")
    show.add_argument("--prompt", default="Explain in three sentences why the sky is blue.")
    show.add_argument("--max-tokens", type=_positive, default=96, metavar="N")
    ask = commands.add_parser("status", help="the workers of a running deployment")
    leave = commands.add_parser("drain", help="let a worker end what it has, and leave")
    leave.add_argument("worker", help="its name, as `pdserve status` shows it")
    leave.add_argument(
        "--timeout-s",
        type=_seconds,
        metavar="N",
        help="until what it still runs goes on elsewhere; default: its drain_timeout_s",
    )
    resize = commands.add_parser("scale", help="add workers to a pool of a running `pdserve up`, or drain some")
    resize.add_argument("pool", choices=[str(role) for role in Role])
    resize.add_argument("replicas", type=_count, metavar="N", help="how many workers it shall have")
    resize.add_argument(
        "--timeout-s",
        type=_seconds,
        default=SCALE_TIMEOUT_S,
        metavar="N",
        help="how long to watch; default: %(default)g",
    )
    examine = commands.add_parser("doctor", help="is all here that serving needs, how fast is it, does splitting pay?")
    for asking in (ask, leave, resize, examine):
        asking.add_argument(
            "--router", type=_address, metavar="HOST:PORT", help="its control address; default: config's"
        )
        asking.add_argument("--config", type=Path, help="of the deployment; default: as for up")
        where = asking.add_mutually_exclusive_group()
        where.add_argument("--logs", type=Path, metavar="FOLDER", help="of its `pdserve up --logs`, in place of both")
        where.add_argument("--address", help="of the Ray cluster that it runs on: 'auto' or HOST:PORT")
    make = commands.add_parser("key", help="a new API key, and the line of it for router.api_keys_file")
    make.add_argument("name", help="whose it is")
    for unit in ("requests", "tokens"):
        make.add_argument(f"--{unit}-per-minute", type=_positive, metavar="N", help="default: no limit")
    return parser


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 up")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 up")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port")
    return int(text)


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return text


def _exit_on_signal(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _complain(error: Exception) -> None:
    print("pdserve:", " ".join(str(error).split()), file=sys.stderr)  # one line, also of what came with line breaks


if __name__ == "__main__":
    sys.exit(main())
