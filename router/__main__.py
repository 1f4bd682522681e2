"""python -m router --config serve.yaml [--http-port N] [--grpc-port N] [--control-port N] [--metrics-port N]"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import uvloop

from common.config import RouterSection, ServeConfig, load_config
from common.process import run_process
from router.server import RouterServer


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m router", description="The router of pdserve.")
    parser.add_argument("--config", type=Path, default=Path("serve.yaml"), help="default: serve.yaml")
    for port in ("http_port", "grpc_port", "control_port", "metrics_port"):
        parser.add_argument(f"--{port.replace('_', '-')}", type=int, help=f"instead of the config's router.{port}")
    given = vars(parser.parse_args())
    path = given.pop("config")

    def config() -> ServeConfig:
        base = load_config(path)
        changed = {key: value for key, value in given.items() if value is not None}
        router = RouterSection.model_validate(base.router.model_dump() | changed)
        return base.model_copy(update={"router": router})

    # most of what the router does is to wake up, read a little and write a little
    return run_process("router", lambda: RouterServer.start(config()), new_loop=uvloop.new_event_loop)


if __name__ == "__main__":
    sys.exit(main())
