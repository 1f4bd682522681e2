"""Two processes in two network namespaces; the cable between them is cut in the middle of a transfer, and mended."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import pytest

from tests.kv_transfer.wires import until

NOTICED_S = 10.0  # keepalives promise two seconds, of an idle machine
STARTED_S = 60.0
SOURCE_HOST, DESTINATION_HOST = "10.213.7.1", "10.213.7.2"


@dataclass(frozen=True)
class Cable:
    """A veth pair between two namespaces of this test's own."""

    name: str

    @property
    def source_side(self) -> str:
        return f"{self.name}s"

    @property
    def destination_side(self) -> str:
        return f"{self.name}d"

    def lay(self) -> None:
        """Raises: CalledProcessError where this is not allowed."""
        for side in (self.source_side, self.destination_side):
            ip("netns", "add", side)
        ip("link", "add", self.source_side, "netns", self.source_side, "type", "veth", "peer", "name",
           self.destination_side, "netns", self.destination_side)  # fmt: skip
        for side, host in ((self.source_side, SOURCE_HOST), (self.destination_side, DESTINATION_HOST)):
            ip("-n", side, "address", "add", f"{host}/24", "dev", side)
            ip("-n", side, "link", "set", "lo", "up")
            ip("-n", side, "link", "set", side, "up")

    def cut(self) -> None:
        ip("-n", self.destination_side, "link", "set", self.destination_side, "down")

    async def mend(self) -> None:
        """Returns when the kernel has noticed on both sides, and looks for the neighbour afresh."""
        ip("-n", self.destination_side, "link", "set", self.destination_side, "up")
        for side in (self.source_side, self.destination_side):
            await until(partial(_is_up, side), "the cable mended")
            ip("-n", side, "neighbour", "flush", "all")

    def remove(self) -> None:
        """The pair goes with its namespaces."""
        for side in (self.source_side, self.destination_side):
            subprocess.run(["ip", "netns", "delete", side], capture_output=True, check=False)


@pytest.fixture
def cable() -> Iterator[Cable]:
    if shutil.which("ip") is None:
        pytest.skip("the command ip is not installed")
    cable = Cable(f"pdkv{secrets.token_hex(3)}")
    try:
        try:
            cable.lay()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        yield cable
    finally:
        cable.remove()


@dataclass(frozen=True)
class Peer:
    process: asyncio.subprocess.Process

    async def says(self, timeout_s: float) -> str:
        assert self.process.stdout is not None
        async with asyncio.timeout(timeout_s):
            return (await self.process.stdout.readline()).decode().strip()

    async def says_at_last(self, expected: str, timeout_s: float) -> None:
        """Whatever it says before."""
        async with asyncio.timeout(timeout_s):
            while (said := await self.says(timeout_s)) != expected:
                assert said, f"it ended before it said {expected!r}"

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")


@asynccontextmanager
async def peer_in(namespace: str, *arguments: str) -> AsyncIterator[Peer]:
    process = await asyncio.create_subprocess_exec(
        "ip", "netns", "exec", namespace, sys.executable, "-m", "tests.kv_transfer.net_peer", *arguments,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "GRPC_VERBOSITY": "NONE"},
    )  # fmt: skip
    try:
        yield Peer(process)
    finally:
        if process.returncode is None:
            process.kill()  # `ip netns exec` becomes the command that it runs
        await process.wait()


def _is_up(side: str) -> bool:
    return "state UP" in ip("-n", side, "link", "show", side)


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("kind", ["grpc", "tcp"])
async def test_a_cut_link_fails_the_transfer_and_a_mended_one_carries_the_next_attempt(kind: str, cable: Cable) -> None:
    async with (
        peer_in(cable.destination_side, "receive", kind, DESTINATION_HOST) as destination,
        peer_in(cable.source_side, "send", kind) as source,
    ):
        source.tell(await destination.says(STARTED_S))
        assert await source.says(STARTED_S) == "begun 1"
        assert await destination.says(NOTICED_S) == "piece 0"
        cable.cut()
        source.tell("go on")
        assert await source.says(NOTICED_S) == "PeerLost"
        await cable.mend()
        source.tell("go on")
        assert await source.says(NOTICED_S) == "begun 2"
        source.tell("go on")
        assert await source.says(NOTICED_S) == "confirmed"
        await destination.says_at_last("committed attempt 2 equal", NOTICED_S)
