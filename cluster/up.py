"""`pdserve up`: model, ports, members, and then serving until somebody says stop."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_log_path
from rich.console import Console

from cluster.deployment import announce_members, run_deployment, until_signal
from cluster.display import Display
from cluster.host import MemberSpec, WorkerHost
from cluster.plan import Overrides, Plan, available_cores, make_plan, with_free_ports
from cluster.processes import ProcessHost, python_command
from cluster.run_secret import with_secret
from common.config import ServeConfig
from common.errors import ConfigError
from common.model_source import resolve_model

RUNS_KEPT = 10
STOP_MARGIN_S = 10.0  # after a member should have drained, before it is killed
CONFIG_NAME = "serve.yaml"  # in the log folder: what this run's members read, with its ports and its secret's file


@dataclass(frozen=True)
class UpOptions:
    config: ServeConfig
    overrides: Overrides
    log_folder: Path | None  # None: a folder per run under the user's log folder
    ray_address: str | None  # None: processes of this machine; "local", "auto" or host:port: Ray


def run_up(options: UpOptions, console: Console) -> int:
    deploy(options, console, announce_members)
    return 0


def deploy(options: UpOptions, console: Console, work: Callable[[Plan, Display], Coroutine[None, None, None]]) -> None:
    """Start what `options` describe, do `work` while it runs, and leave nothing behind.

    Raises: ConfigError before anything is started if it can be known by then.
    """
    is_one_machine = options.ray_address in (None, "local")
    plan = make_plan(options.config, options.overrides, available_cores() if is_one_machine else None)
    with Display(console) as display:
        model = resolve_model(plan.config.model.source, display.doing)
        display.settled(f"model {plan.config.model.served_name}, {model}")
        logs = new_log_folder(options.log_folder)
        display.settled(f"logs in {logs}")
        display.doing("starting")
        with with_secret(plan, logs) as plan:
            plan, host = _host(options.ray_address, plan, logs, display)
            asyncio.run(_run(plan, host, display, work(plan, display)))
        display.settled("stopped")


async def _run(plan: Plan, host: WorkerHost, display: Display, work: Coroutine[None, None, None]) -> None:
    """Until `work` is done or somebody says stop; who says it again does not wait for what is still being answered."""

    def on_signal(count: int) -> None:
        if count == 1:
            display.stopping(plan)
        else:
            host.hurry()

    await until_signal(run_deployment(plan, host, display, work), on_signal)


def _host(ray_address: str | None, plan: Plan, logs: Path, display: Display) -> tuple[Plan, WorkerHost]:
    if ray_address is not None:
        from cluster.ray_host import start_ray  # seconds to import, for those who ask for it

        plan, ray_host = start_ray(ray_address, plan, logs, display.doing)
        plan.write(logs / CONFIG_NAME)  # for `pdserve status`
        return plan, ray_host
    plan = with_free_ports(plan)
    config_path = logs / CONFIG_NAME
    plan.write(config_path)

    def command(spec: MemberSpec) -> list[str]:
        return python_command(spec, config_path, plan.control_addresses)

    return plan, ProcessHost(command, logs, plan.longest_drain_s + STOP_MARGIN_S)


def new_log_folder(chosen: Path | None) -> Path:
    """A fresh folder for this run; of earlier runs that have ended the last few are kept."""
    folder = chosen or user_log_path("pdserve") / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot make the log folder {folder}: {error.strerror}; choose another with --logs"
        ) from error
    if chosen is None:
        ended = [old for old in _runs() if not _is_running(old)]
        for old in ended[:-RUNS_KEPT]:
            shutil.rmtree(old, ignore_errors=True)
    return folder


def living_runs() -> list[Path]:
    """The log folders, where nobody chose another one, of this user's runs; the newest first."""
    return [run for run in reversed(_runs()) if _is_running(run)]


def _runs() -> list[Path]:
    return sorted(user_log_path("pdserve").glob("2*-*-*"))


def _is_running(run: Path) -> bool:
    """Whether the process that a run's folder is named after is still there."""
    try:
        os.kill(int(run.name.rpartition("-")[2]), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True
