"""Runs a command that cannot outlive its parent: `python -I -S tether.py PARENT_PID COMMAND...`.

Linux kills the process when its parent dies, even by SIGKILL (PR_SET_PDEATHSIG, which execve keeps). Set here and not
between fork and exec of the parent, where threads of other libraries make Python code unsafe.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(parent_pid: int, command: list[str]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        sys.exit("the parent is gone already")
    os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
