"""The pdserve command as a person runs it: a process, its output, its children, its end."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

READY_S = 90.0  # on two busy cores
END_S = 30.0
ROOT = Path(__file__).parent.parent.parent


@dataclass
class PdserveProcess:
    process: asyncio.subprocess.Process
    lines: list[str] = field(default_factory=list)  # of stdout, as far as read

    async def line(self, pattern: str, timeout_s: float = READY_S) -> str:
        """The next line of output that begins with `pattern`."""
        assert self.process.stdout is not None
        async with asyncio.timeout(timeout_s):
            async for raw in self.process.stdout:
                self.lines.append(raw.decode().rstrip())
                if re.match(pattern, self.lines[-1]):
                    return self.lines[-1]
        raise AssertionError(f"it ended without {pattern!r}: {self.lines} {await self.errors()}")

    async def url(self) -> str:
        """Where it serves HTTP, once it is ready."""
        return (await self.line(r"\s+OpenAI API")).split()[-1].removesuffix("/v1")

    async def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return await self.exit_code()

    async def exit_code(self) -> int:
        async with asyncio.timeout(END_S):
            return await self.process.wait()

    async def errors(self) -> str:
        assert self.process.stderr is not None
        async with asyncio.timeout(END_S):
            return (await self.process.stderr.read()).decode()

    def child(self, name: str) -> int:
        """The pid of one member."""
        return next(pid for pid in self.children() if f"--name\0{name}\0" in command_line(pid))

    def children(self) -> list[int]:
        return [pid for pid in all_pids() if parent_of(pid) == self.process.pid]


@asynccontextmanager
async def pdserve(*arguments: str, logs: Path) -> AsyncIterator[PdserveProcess]:
    command = [sys.executable, "-m", "cluster.cli", *arguments, "--logs", str(logs)]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=pipe, stderr=pipe)
    try:
        yield PdserveProcess(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@dataclass(frozen=True)
class Ended:
    code: int
    lines: list[str]  # of stdout, then of stderr


async def run(*arguments: str, timeout_s: float = READY_S) -> Ended:
    """A command that ends by itself."""
    pipe = asyncio.subprocess.PIPE
    command = [sys.executable, "-m", "cluster.cli", *arguments]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=pipe, stderr=pipe)
    try:
        async with asyncio.timeout(timeout_s):
            output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return Ended(process.returncode, (output + errors).decode().splitlines())


async def until(condition: Callable[[], bool], timeout_s: float = END_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not come true in time"
        await asyncio.sleep(0.02)


def is_alive(pid: int) -> bool:
    return state_of(pid) not in (None, "Z")


def all_pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def parent_of(pid: int) -> int | None:
    fields = _stat(pid)
    return int(fields[1]) if fields else None


def state_of(pid: int) -> str | None:
    fields = _stat(pid)
    return fields[0] if fields else None


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def environment(pid: int) -> str:
    """As the process was started with."""
    return Path(f"/proc/{pid}/environ").read_text()


def _stat(pid: int) -> list[str]:
    """The fields after the command's name: state, parent, ..."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
