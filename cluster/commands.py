"""What each command of cli.py does. Each imports its own: `pdserve drain` must be quick where there is no time."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from common.config import Role, ServeConfig, load_config

if TYPE_CHECKING:
    from cluster.running import RunningDeployment
    from cluster.up import UpOptions

DEFAULT_CONFIG = Path("serve.yaml")
PORTS = ("http_port", "grpc_port", "control_port", "metrics_port")
PIPED_WIDTH = 160  # columns of a table that no terminal limits


def _up(arguments: argparse.Namespace, console: Console) -> int:
    from cluster.up import run_up

    return run_up(_up_options(arguments), console)


def _demo(arguments: argparse.Namespace, console: Console) -> int:
    from cluster.demo import run_demo

    return run_demo(_up_options(arguments), arguments.prompt, arguments.max_tokens, console)


def _status(arguments: argparse.Namespace, console: Console) -> int:
    from cluster.status import show_status

    if not console.is_terminal:
        console.width = PIPED_WIDTH
    return asyncio.run(show_status(_find(arguments), console))


def _drain(arguments: argparse.Namespace, console: Console) -> int:
    from cluster.drain import DrainWish, drain

    return asyncio.run(drain(_find(arguments), DrainWish(arguments.worker, arguments.timeout_s), console))


def _scale(arguments: argparse.Namespace, console: Console) -> int:
    from cluster.scale import ScaleWish, scale

    wish = ScaleWish(Role(arguments.pool), arguments.replicas, arguments.timeout_s)
    return asyncio.run(scale(_find(arguments), wish, console))


def _doctor(arguments: argparse.Namespace, console: Console) -> int:
    from cluster.doctor import run_doctor
    from cluster.plan import Overrides
    from cluster.up import CONFIG_NAME, UpOptions

    config = _config(arguments.config if arguments.logs is None else arguments.logs / CONFIG_NAME)
    return run_doctor(UpOptions(config, Overrides(), None, None), _find(arguments), console)


def _key(arguments: argparse.Namespace, console: Console) -> int:
    from cluster.key import make_key
    from router.tenant import RateLimits

    return make_key(arguments.name, RateLimits(arguments.requests_per_minute, arguments.tokens_per_minute))


COMMANDS: dict[str, Callable[[argparse.Namespace, Console], int]] = {
    "up": _up,
    "demo": _demo,
    "status": _status,
    "drain": _drain,
    "scale": _scale,
    "doctor": _doctor,
    "key": _key,
}


def _find(arguments: argparse.Namespace) -> RunningDeployment:
    if arguments.address is not None:
        from cluster.ray_lookup import find_on_ray  # seconds to import, for those who ask for it

        return find_on_ray(arguments.address, arguments.router)
    from cluster.running import find_running

    return find_running(_config(arguments.config), arguments.router, arguments.logs)


def _up_options(arguments: argparse.Namespace) -> UpOptions:
    from cluster.plan import Overrides
    from cluster.up import UpOptions

    return UpOptions(
        config=_config(arguments.config),
        overrides=Overrides(
            replicas={role: vars(arguments)[role] for role in Role},
            ports={key: vars(arguments)[key] for key in PORTS},
            router_processes=arguments.router_processes,
        ),
        log_folder=arguments.logs,
        ray_address="local" if arguments.ray else arguments.address,
    )


def _config(path: Path | None) -> ServeConfig:
    if path is None and not DEFAULT_CONFIG.exists():
        return ServeConfig()
    return load_config(path or DEFAULT_CONFIG)
