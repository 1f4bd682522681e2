"""How a member's process starts and ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
SERVICE = """
import asyncio, gc, sys
from common.process import run_process

class Service:
    async def wait_crashed(self):
        await asyncio.Event().wait()
    def begin_drain(self):
        pass
    async def wait_drained(self):
        await asyncio.sleep(0)
        print(gc.get_freeze_count(), len(gc.get_objects()), flush=True)
    async def stop(self):
        print("stopped", flush=True)

async def start():
    return Service()

sys.exit(run_process("any", start))
"""


def test_what_is_loaded_when_a_service_serves_is_not_collected_again() -> None:
    command = [sys.executable, "-c", SERVICE]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    counts, stopped = ended.stdout.splitlines()
    num_frozen, num_watched = map(int, counts.split())
    assert num_frozen > 10_000
    assert num_watched < num_frozen / 10
    assert stopped == "stopped"
