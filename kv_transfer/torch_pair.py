"""Two-rank process groups with their own store, apart from any default group: gloo between CPUs, NCCL between GPUs.

Everything here blocks: it belongs on the one thread that a link gives it. Rank 0 is the destination, rank 1 the source.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from contextlib import suppress
from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup, ProcessGroupGloo, Store, TCPStore, Work

DESTINATION, SOURCE = 0, 1
_PAYLOAD_TAG, _WAKE_TAG = 0, 1
_NCCL_POLL_S = 0.0002


class Pair(Protocol):
    """Failures are RuntimeErrors; after one the pair is dead on both sides."""

    def send(self, flat: Tensor, timeout_s: float) -> None:
        """Return when `flat` may be reused."""

    def receive(self, flat: Tensor, timeout_s: float) -> None:
        """Fill `flat`, which must not be smaller than what is sent: a smaller one kills this process."""

    def abort(self) -> None:
        """End the pair, and any call that waits in it. Safe from any thread."""

    def let_go(self) -> None:
        """Free its sockets, threads and memory, after `abort` and when no call waits any more."""


def host_store(host: str, timeout_s: float) -> tuple[TCPStore, str]:
    """A store listening on this host's address alone, and host:port to reach it at."""
    address = _resolve(host)
    with socket.create_server((address, 0), family=_family(address)) as listener:
        port = listener.getsockname()[1]
        store = TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listener.detach(),
        )
    return store, f"{address}:{port}"


def join_store(store_address: str, timeout_s: float) -> tuple[TCPStore, str]:
    """The peer's store, and this machine's own address on the way to it."""
    host, _, port = store_address.rpartition(":")
    with socket.socket(_family(host), socket.SOCK_DGRAM) as route:
        route.connect((host, int(port)))  # sends nothing; picks the interface
        own_address: str = route.getsockname()[0]
    store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    return store, own_address


def make_pair(store: Store, rank: int, own_address: str, device: torch.device, timeout_s: float) -> Pair:
    """Returns when both ends are here. Raises: RuntimeError."""
    if device.type == "cuda":
        return NcclPair(store, rank, device, timeout_s)
    return GlooPair(store, rank, own_address, timeout_s)


class GlooPair:
    def __init__(self, store: Store, rank: int, own_address: str, timeout_s: float) -> None:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        # Given its address, gloo does not resolve this machine's host name.
        options._devices = [ProcessGroupGloo.create_device(hostname=own_address, lazy_init=False)]
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 1
        self._peer = 1 - rank
        self._group = cast(ProcessGroup, ProcessGroupGloo(store, rank, 2, options))

    def send(self, flat: Tensor, timeout_s: float) -> None:
        self._group.send([flat], self._peer, _PAYLOAD_TAG).wait(timedelta(seconds=timeout_s))

    def receive(self, flat: Tensor, timeout_s: float) -> None:
        self._group.recv([flat], self._peer, _PAYLOAD_TAG).wait(timedelta(seconds=timeout_s))

    def abort(self) -> None:
        """A timeout anywhere closes a gloo pair on both sides, and nothing else does."""
        with suppress(RuntimeError):
            self._group.recv([torch.empty(1, dtype=torch.uint8)], self._peer, _WAKE_TAG).wait(timedelta(milliseconds=1))

    def let_go(self) -> None:
        del self._group


class NcclPair:
    """NCCL knows no tags: calls must come in the same order on both ranks, which the headers on the link ensure."""

    def __init__(self, store: Store, rank: int, device: torch.device, timeout_s: float) -> None:
        # By default torch's watchdog ends the whole process when one pair fails, its monitor even for a slow one.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        self._peer = 1 - rank
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._group = cast(ProcessGroup, dist.ProcessGroupNCCL(store, rank, 2, options))
        self._is_aborted = False

    def send(self, flat: Tensor, timeout_s: float) -> None:
        with torch.cuda.stream(self._stream):
            self._finish(self._group.send([flat], self._peer, _PAYLOAD_TAG), timeout_s)

    def receive(self, flat: Tensor, timeout_s: float) -> None:
        self._stream.wait_stream(torch.cuda.default_stream(self._device))  # whoever last used this memory is done
        with torch.cuda.stream(self._stream):
            self._finish(self._group.recv([flat], self._peer, _PAYLOAD_TAG), timeout_s)

    def abort(self) -> None:
        self._is_aborted = True
        self._group.abort()

    def let_go(self) -> None:
        del self._group

    def _finish(self, work: Work, timeout_s: float) -> None:
        """NCCL's own wait only orders streams; the host must know, or the memory would be reused under the copy."""
        deadline_s = time.monotonic() + timeout_s
        while not work.is_completed():
            if self._is_aborted:
                raise RuntimeError("the NCCL pair was aborted")
            if time.monotonic() > deadline_s:
                self.abort()
                raise RuntimeError(f"NCCL has not moved the payload within {timeout_s} s")
            time.sleep(_NCCL_POLL_S)
        work.wait()  # raises if it completed by failing


def _resolve(host: str) -> str:
    address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    return str(address)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
