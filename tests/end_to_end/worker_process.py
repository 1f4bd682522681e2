"""A worker as a real process of its own, so that a test can kill it."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import yaml

from common.config import ServeConfig

ROOT = Path(__file__).parents[2]
STOP_S = 20.0


@asynccontextmanager
async def worker_process(
    package: str, name: str, config: ServeConfig, router_address: str, folder: Path
) -> AsyncIterator[asyncio.subprocess.Process]:
    """`python -m package`, registered under `name`; killed at the end if it still runs."""
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", package, "--config", str(path), "--name", name, "--router", router_address, cwd=ROOT
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
        await asyncio.wait_for(process.wait(), STOP_S)
