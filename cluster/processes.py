"""Hosts members as processes of this machine: one session each, output in log files, nothing left behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from cluster import tether
from cluster.host import Ending, HostError, MemberSpec, Patience
from common.config import Role

CONFIG_ERROR_EXIT_CODE = 2
HURRIED_STOP_S = 5.0  # from SIGINT on
_LAST_WORDS_BYTES = 4000
_ALL_IS_WELL = re.compile(r"\d\d:\d\d:\d\d [DI] ")  # a line of level DEBUG or INFO, as common/logs.py writes it


class ProcessHost:
    """Every child dies with this process, however it dies; see tether.py."""

    def __init__(
        self, command: Callable[[MemberSpec], list[str]], log_folder: Path, stop_timeout_s: float = 10.0
    ) -> None:
        self._command = command
        self._log_folder = log_folder
        self._stop_timeout_s = stop_timeout_s
        self._patience = Patience()

    async def start(self, spec: MemberSpec) -> ProcessMember:
        log_path = self._log_folder / f"{spec.name}.log"
        leash = [sys.executable, "-I", "-S", tether.__file__, str(os.getpid())]
        try:
            with log_path.open("ab") as log:
                log_start = log.tell()
                process = await asyncio.create_subprocess_exec(
                    *leash,
                    *self._command(spec),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # the terminal's Ctrl-C is ours to hand on
                )
        except OSError as error:
            raise HostError(f"cannot start {spec.name}: {error}") from error
        return ProcessMember(process, log_path, log_start, self._stop_timeout_s, self._patience)

    def hurry(self) -> None:
        self._patience.end()

    async def close(self) -> None:
        return


class ProcessMember:
    def __init__(
        self,
        process: asyncio.subprocess.Process,
        log_path: Path,
        log_start: int,
        stop_timeout_s: float,
        patience: Patience,
    ) -> None:
        self.pid = process.pid
        self._process = process
        self._log_path = log_path
        self._log_start = log_start  # where this life begins in a log that earlier lives have written to
        self._stop_timeout_s = stop_timeout_s
        self._patience = patience

    @property
    def obstacle(self) -> str:
        return ""

    async def ended(self) -> Ending:
        code = await self._process.wait()
        self._kill_session()  # whatever the member itself had started
        reason = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return Ending(
            reason, last_words(self._log_path, self._log_start), code == CONFIG_ERROR_EXIT_CODE, has_left=code == 0
        )

    async def stop(self) -> None:
        self._tell(signal.SIGTERM)
        await self._patience.wait(self._process.wait(), self._stop_timeout_s)
        if self._patience.is_over:
            self._tell(signal.SIGINT)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), HURRIED_STOP_S)
        self._kill_session()
        await self._process.wait()

    def _tell(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    def _kill_session(self) -> None:
        with suppress(ProcessLookupError, PermissionError):  # macOS answers EPERM for a group of zombies
            os.killpg(self.pid, signal.SIGKILL)


def python_command(spec: MemberSpec, config_path: Path, routers: list[str], python: str = sys.executable) -> list[str]:
    """What a person would type to run this member bare. routers: their control addresses."""
    if spec.role is None:
        command = [python, "-m", "router", "--config", str(config_path)]
        if (ports := spec.admin_ports) is not None:
            command += ["--control-port", str(ports.control), "--metrics-port", str(ports.metrics)]
        return command
    package = "prefill_worker" if spec.role is Role.PREFILL else "decode_worker"
    command = [python, "-m", package, "--config", str(config_path), "--name", spec.name]
    for router in routers:
        command += ["--router", router]
    if spec.num_threads is not None:
        command += ["--num-threads", str(spec.num_threads)]
    return [*command, "--colocated"] if spec.role is Role.COLOCATED else command


def last_words(log_path: Path, start: int = 0) -> str:
    """The last lines of a log from byte `start` on that say more than that all is well; none if it is gone."""
    try:
        with log_path.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(start, end - _LAST_WORDS_BYTES))
            lines = log.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return "\n".join([line for line in lines if not _ALL_IS_WELL.match(line)][-5:])
