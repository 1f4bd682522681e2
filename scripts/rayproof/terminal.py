"""A terminal with one command in it, as a person has: what it says is read at once, and Ctrl-C can be typed into it."""

from __future__ import annotations

import os
import re
import subprocess
import termios
import threading
import time
from collections.abc import Mapping
from pathlib import Path

CTRL_C = "\x03"
SIZE = (50, 160)  # lines, columns: no table is folded
CONTROL_SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
MOVING_LINE = re.compile("[\u2800-\u28ff] ")  # begins with a spinner


class CommandFailed(Exception):
    """It says which and how."""


class Terminal:
    """Runs `command` in bash, and shows it and what it says on our own standard output."""

    def __init__(self, command: str, folder: Path, environment: Mapping[str, str]) -> None:
        print(f"$ {command}", flush=True)
        self._command = command
        self._lines: list[str] = []
        self._news = threading.Condition()
        self._keyboard, screen = os.openpty()
        termios.tcsetwinsize(screen, SIZE)
        self._process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=folder,
            env=environment,
            stdin=screen,
            stdout=screen,
            stderr=screen,
            start_new_session=True,
        )
        os.close(screen)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def type(self, keys: str) -> None:
        os.write(self._keyboard, keys.encode())

    def line(self, pattern: str, timeout_s: float) -> str:
        """The first line that begins with `pattern`, once it is there. Raises: CommandFailed when none comes."""
        deadline_s = time.monotonic() + timeout_s
        seen = 0
        with self._news:
            while True:
                for line in self._lines[seen:]:
                    if re.match(pattern, line):
                        return line
                seen = len(self._lines)
                if not self._reader.is_alive() or time.monotonic() > deadline_s:
                    raise CommandFailed(f"no line {pattern!r} came from: {self._command}")
                self._news.wait(0.5)

    def end(self, timeout_s: float) -> list[str]:
        """Wait for its end, and return all lines. Raises: CommandFailed unless it ends in time and with status 0."""
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = None
        self._reader.join(5.0)  # a connection that ssh keeps for the next command may hold the terminal open
        if status != 0:
            how = "did not end in time" if status is None else f"ended with status {status}"
            raise CommandFailed(f"{how}: {self._command}")
        return self.lines

    @property
    def lines(self) -> list[str]:
        with self._news:
            return list(self._lines)

    def _read(self) -> None:
        with os.fdopen(self._keyboard, "r", errors="replace", newline="", closefd=False) as screen:
            try:
                for text in screen:
                    line = CONTROL_SEQUENCE.sub("", text).rstrip()
                    if line and not MOVING_LINE.match(line):
                        print(line, flush=True)
                        with self._news:
                            self._lines.append(line)
                            self._news.notify_all()
            except OSError:  # EIO: nobody has the other end any more
                return
