"""A private network, file view and process table, entered by starting this program again inside of them."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

TOOLS = ("ip", "unshare", "setpriv", "mount", "ssh", "ssh-keygen", "sshd", "rsync", "make", "bash")
UNSHARE = ("unshare", "--mount", "--net", "--pid", "--ipc", "--uts", "--fork", "--kill-child", "--mount-proc")
HOME = Path(pwd.getpwuid(os.geteuid()).pw_dir)
HIDDEN = (Path("/tmp"), Path("/var/log"), Path("/dev/shm"), HOME)  # where hosts would meet, or the machine keep traces
MACHINE = Path("/run/machine")  # on the stage and its hosts: all that was there before
RESOLVER = Path("/etc/resolv.conf")
SBIN = "/usr/local/sbin:/usr/sbin:/sbin"  # sshd and ip, which a user's path may leave out


def missing() -> str:
    """Why hosts cannot be made here; empty if they can."""
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    absent = [tool for tool in TOOLS if shutil.which(tool, path=tool_path()) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (Debian: iproute2 util-linux openssh-server rsync make)"
    probe = [
        *UNSHARE,
        "sh",
        "-c",
        "mount -t tmpfs none /tmp && ip link add lan type bridge && ip link add cable type veth",
    ]
    tried = subprocess.run(probe, env=_with_tools(), capture_output=True, text=True, timeout=30)
    return "" if tried.returncode == 0 else f"namespaces cannot be made here: {tried.stderr.strip()}"


def play(program: Path, arguments: Sequence[str]) -> int:
    """Run a program of ours as the first process of a stage. Returns its exit status, 128 + a signal that ended us."""
    # A stage whose audience is killed is killed by the kernel (--pdeathsig); its first process takes all others along.
    inside = [*UNSHARE, sys.executable, str(program), *arguments]
    process = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", *inside], env=_with_tools(), stdin=subprocess.DEVNULL, start_new_session=True
    )
    signal.signal(signal.SIGTERM, _end_by_exception)
    try:
        return process.wait()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except SystemExit as ending:
        return int(ending.code or 0)
    finally:
        process.kill()
        process.wait()


def furnish(kept: Sequence[Path]) -> None:
    """The stage's own files: empty folders where hosts would meet. `kept` stay what they are, wherever they are."""
    mount("--make-rprivate", "/")
    mount("-t", "tmpfs", "none", "/run")
    MACHINE.mkdir()
    mount("--rbind", "/", str(MACHINE))
    hide(kept)
    if RESOLVER.exists():  # nobody answers here, and a name server out of reach is waited for
        silent = Path("/run/resolv.conf")
        silent.touch()
        mount("--bind", str(silent), str(RESOLVER))


def hide(kept: Sequence[Path]) -> None:
    for folder in HIDDEN:
        mount("-t", "tmpfs", "none", str(folder))
        folder.chmod(0o1777 if folder != HOME else 0o700)
    for path in kept:
        if any(path.is_relative_to(folder) for folder in HIDDEN):
            before = MACHINE / path.relative_to("/")
            if before.is_dir():
                path.mkdir(parents=True, exist_ok=True)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
            mount("--bind", str(before), str(path))


def mount(*arguments: str) -> None:
    run(["mount", *arguments])


def run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, timeout=30)


def tool_path() -> str:
    return f"{os.environ.get('PATH', os.defpath)}:{SBIN}"


def _with_tools() -> dict[str, str]:
    return os.environ | {"PATH": tool_path()}


def _end_by_exception(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)
