"""NIXL writes between real processes: whole or an error, and who may touch the memory when an end is gone."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from common.errors import ConfigError, PeerLost
from kv_transfer.nixl_agent import MemoryInDoubt, NixlAgent
from kv_transfer.nixl_window import NixlTarget, NixlWriter, Window
from tests.kv_transfer.nixl_peer import LOOPBACK, SIZE, WRITTEN

needs_nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="NIXL is not installed: pip install 'pdserve[nixl]'"
)
BOUND_S = 10.0

StartPeer = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start_peer() -> Iterator[StartPeer]:
    peers: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.kv_transfer.nixl_peer", *arguments]
        peers.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return peers[-1]

    yield start
    for peer in peers:
        peer.kill()
        peer.wait()
        assert peer.stdout is not None
        peer.stdout.close()


@needs_nixl
def test_a_notification_follows_the_bytes_that_it_tells_of(start_peer: StartPeer) -> None:
    staging = zeros()
    with closing(NixlTarget(staging, LOOPBACK)) as target:
        peer = start_peer("writer", hex_of(target), "2")
        assert until_told(target) == b"write 0"
        assert bool((staging == WRITTEN).all())
        assert until_told(target) == b"write 1"
        assert peer.wait(BOUND_S) == 0


@needs_nixl
def test_a_write_goes_to_its_offset_and_nowhere_else(start_peer: StartPeer) -> None:
    peer = start_peer("target")
    staging = torch.full((SIZE,), WRITTEN, dtype=torch.uint8)
    with closing(NixlWriter(window_of(peer), staging, LOOPBACK)) as writer:
        writer.write(staging[:1000], 64, b"first", BOUND_S)
        assert next_line(peer) == "first 1000"
        writer.write(staging[5000:6000], 564, b"half of it again", BOUND_S)
        assert next_line(peer) == "half of it again 1500"
        writer.write(staging[:1], SIZE - 1, b"last", BOUND_S)
        assert next_line(peer) == "last 1501"


@needs_nixl
def test_a_write_past_the_end_of_the_window_is_refused(start_peer: StartPeer) -> None:
    staging = zeros()
    window = window_of(start_peer("target"))
    with closing(NixlWriter(window, staging, LOOPBACK)) as writer, pytest.raises(PeerLost):
        writer.write(staging[:100], SIZE - 99, b"", BOUND_S)


@needs_nixl
def test_a_writer_learns_at_once_that_its_target_was_killed_and_can_write_to_the_next(start_peer: StartPeer) -> None:
    peer = start_peer("target")
    staging = zeros()
    writer = NixlWriter(window_of(peer), staging, LOOPBACK)
    writer.write(staging, 0, b"whole", BOUND_S)
    peer.send_signal(signal.SIGSTOP)  # so that the write is in the middle when the peer dies
    killing = threading.Timer(0.3, peer.kill)
    killing.start()
    with pytest.raises(PeerLost) as lost:
        writer.write(staging, 0, b"cut off", timeout_s=60)
    killing.join()
    with pytest.raises(PeerLost):
        writer.write(staging, 0, b"", BOUND_S)
    writer.close()
    assert lost.value.__cause__ is not None  # whoever still holds the error does not hold the agent

    replacement = start_peer("target")
    with closing(NixlWriter(window_of(replacement), staging, LOOPBACK)) as writer:
        writer.write(staging.fill_(WRITTEN), 0, b"whole", BOUND_S)
        assert next_line(replacement) == f"whole {SIZE}"


@needs_nixl
def test_nothing_that_a_writer_holds_later_reaches_a_target_that_was_frozen(start_peer: StartPeer) -> None:
    peer = start_peer("target")
    staging = zeros()
    writer = NixlWriter(window_of(peer), staging, LOOPBACK)
    writer.write(staging[:1], 0, b"connected", BOUND_S)
    assert next_line(peer) == "connected 0"
    peer.send_signal(signal.SIGSTOP)
    with pytest.raises(PeerLost, match=r"within 0\.5 s"):
        writer.write(staging, 0, b"cut off", timeout_s=0.5)
    writer.close()
    staging.fill_(WRITTEN)  # as the next link would

    peer.send_signal(signal.SIGCONT)
    peer.terminate()
    assert next_line(peer) == "end 0"


@needs_nixl
def test_a_target_takes_its_memory_back_from_a_writer_that_was_killed(start_peer: StartPeer) -> None:
    staging = zeros()
    target = NixlTarget(staging, LOOPBACK)
    peer = start_peer("writer", hex_of(target), "1000000")
    assert until_told(target) == b"write 0"
    peer.kill()
    peer.wait()
    while target.wait(0.2) is not None:
        pass
    target.close()
    staging.zero_()
    with closing(NixlTarget(staging, LOOPBACK)) as target:
        start_peer("writer", hex_of(target), "1")
        assert until_told(target) == b"write 0"
        assert bool((staging == WRITTEN).all())


@needs_nixl
def test_a_writer_that_wakes_up_cannot_touch_memory_taken_back(start_peer: StartPeer) -> None:
    staging = zeros()
    target = NixlTarget(staging, LOOPBACK)
    peer = start_peer("writer", hex_of(target), "1000000")
    assert until_told(target) == b"write 0"
    target.wait(0)  # the next write is under way
    peer.send_signal(signal.SIGSTOP)
    target.close()
    staging.zero_()
    peer.send_signal(signal.SIGCONT)
    assert peer.wait(BOUND_S) != 0  # it has noticed
    assert int(staging.count_nonzero()) == 0


@needs_nixl
def test_abort_ends_a_write_that_nobody_takes() -> None:
    staging = zeros()
    with (
        closing(NixlTarget(zeros(), LOOPBACK)) as target,
        closing(NixlWriter(target.window, staging, LOOPBACK)) as writer,
        aborting(writer),
        pytest.raises(PeerLost, match="ended"),
    ):
        writer.write(staging, 0, b"", timeout_s=60)


@needs_nixl
def test_abort_ends_a_wait_for_a_silent_writer() -> None:
    with closing(NixlTarget(zeros(), LOOPBACK)) as target, aborting(target), pytest.raises(PeerLost, match="ended"):
        target.wait(timeout_s=60)


@needs_nixl
def test_only_the_writer_that_the_window_names_is_listened_to() -> None:
    with closing(NixlTarget(zeros(), LOOPBACK)) as target:
        stranger = replace(target.window, writer_name="f" * 32)
        assert write_to(target, stranger) == []
        assert write_to(target, target.window) == [b"told"]


@needs_nixl
@pytest.mark.parametrize("cut", [0, 10, 100])
def test_a_broken_window_is_refused(cut: int) -> None:
    with closing(NixlTarget(zeros(), LOOPBACK)) as target:
        encoded = target.window.encode()
    assert Window.decode(encoded) == target.window
    with pytest.raises(PeerLost):
        NixlWriter(Window.decode(encoded[:cut]), zeros(), LOOPBACK)


@needs_nixl
def test_closing_leaves_no_thread_and_no_descriptor() -> None:
    open_and_close()  # the first leaves what UCX keeps for the whole process
    before = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        open_and_close()
    assert (len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))) == before


@needs_nixl
def test_close_says_so_as_long_as_the_agent_lives_on() -> None:
    agent = NixlAgent("held", zeros(), LOOPBACK)
    assert agent._nixl is not None
    held = agent._nixl.agent  # as a leak of ours or of NIXL's would
    for _ in range(2):
        with pytest.raises(MemoryInDoubt):
            agent.close()
    del held
    agent.close()


@needs_nixl
def test_it_listens_on_the_given_device_alone() -> None:
    with closing(NixlTarget(zeros(), LOOPBACK)):
        assert set(listening_addresses()) == {"0100007F"}  # 127.0.0.1


@needs_nixl
def test_what_cannot_start_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="nosuchdevice"):
        NixlTarget(zeros(), "nosuchdevice")
    monkeypatch.setenv("UCX_TLS", "all")
    with pytest.raises(ConfigError, match="unset UCX_TLS"):
        NixlTarget(zeros(), LOOPBACK)


def test_writes_that_were_told_of_together_are_waited_for_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over RDMA writes move without the target's help, so that it may hear of several at its next look."""

    class Agent:
        def __init__(self, *_: object) -> None:
            self.told = [b"first", b"second"]

        def metadata(self) -> bytes:
            return b""

        def notifications(self) -> dict[str, list[bytes]]:
            told, self.told = self.told, []
            return {target.window.writer_name: told}

        def wait_until(self, is_done: Callable[[], bool], timeout_s: float) -> bool:
            return is_done()

    monkeypatch.setattr("kv_transfer.nixl_window.NixlAgent", Agent)
    target = NixlTarget(zeros(), LOOPBACK)
    assert [target.wait(1) for _ in range(3)] == [b"first", b"second", None]


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_transfer.nixl_agent.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'pdserve\[nixl\]'"):
        NixlTarget(zeros(), LOOPBACK)


@contextmanager
def aborting(end: NixlWriter | NixlTarget) -> Iterator[None]:
    timer = threading.Timer(0.2, end.abort)
    timer.start()
    yield
    timer.join()


def zeros() -> Tensor:
    return torch.zeros(SIZE, dtype=torch.uint8)


def hex_of(target: NixlTarget) -> str:
    return target.window.encode().hex()


def window_of(peer: subprocess.Popen[str]) -> Window:
    return Window.decode(bytes.fromhex(next_line(peer)))


def next_line(peer: subprocess.Popen[str]) -> str:
    assert peer.stdout is not None
    return peer.stdout.readline().strip()


def until_told(target: NixlTarget) -> bytes:
    told = target.wait(timeout_s=60)
    assert told is not None
    return told


def write_to(target: NixlTarget, window: Window) -> list[bytes]:
    """What the target is told of a write in this same process."""
    staging = zeros()
    with closing(NixlWriter(window, staging, LOOPBACK)) as writer:
        writing = threading.Thread(target=writer.write, args=(staging[:100], 0, b"told", BOUND_S))
        writing.start()
        told = []
        while writing.is_alive():
            told.append(target.wait(0.01))
        told.append(target.wait(0.1))
        return [notification for notification in told if notification is not None]


def open_and_close() -> None:
    with closing(NixlTarget(zeros(), LOOPBACK)) as target:
        assert write_to(target, target.window) == [b"told"]


def listening_addresses() -> list[str]:
    """IPv4 addresses, in the kernel's hexadecimal, of this process's listening sockets."""
    own = set()
    for descriptor in os.scandir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that lists them
            own.add(os.readlink(descriptor.path))
    with open("/proc/self/net/tcp", encoding="ascii") as table:
        sockets = [line.split() for line in table][1:]
    return [fields[1].partition(":")[0] for fields in sockets if fields[3] == "0A" and f"socket:[{fields[9]}]" in own]
