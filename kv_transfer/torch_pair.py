"""Two-rank process groups of their own, apart from any default group: gloo between CPUs, NCCL between GPUs.

Everything here blocks: it belongs on the threads that a link gives it. Rank 0 is the destination, rank 1 the source.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup, ProcessGroupGloo, Store, Work

DESTINATION, SOURCE = 0, 1
_PAYLOAD_TAG, _WAKE_TAG = 0, 1
_GLOO_PATIENCE = 5  # times its timeout, gloo waits for the other end to connect; to connect itself it takes one
_NCCL_POLL_S = 0.0002


class Moving(Protocol):
    """A payload under way."""

    def finish(self, timeout_s: float) -> None:
        """Wait until it is sent, or here."""


class Pair(Protocol):
    """Payloads move in the order in which they were posted, the same at both ends; several may be under way.

    Failures are RuntimeErrors; after one the pair is dead on both sides.
    """

    def send(self, flat: Tensor) -> Moving:
        """`flat` may be reused once that is finished."""

    def receive(self, flat: Tensor) -> Moving:
        """Fill `flat`, which must not be smaller than what is sent: a smaller one kills this process."""

    def abort(self) -> None:
        """End the pair, and any call that waits in it. Safe from any thread."""

    def let_go(self) -> None:
        """Free its sockets, threads and memory, after `abort` and when no call waits any more."""


@dataclass(frozen=True)
class Tokens:
    """What each end shows on the pair before any payload. Both know them from the link's proven stream."""

    source: bytes
    destination: bytes


def make_pair(store: Store, rank: int, own_address: str, device: torch.device, timeout_s: float) -> Pair:
    """Returns when both ends are here. Raises: RuntimeError."""
    if device.type == "cuda":
        return NcclPair(store, rank, device, timeout_s)
    return GlooPair(store, rank, own_address, timeout_s)


def prove(pair: Pair, rank: int, tokens: Tokens, device: torch.device, timeout_s: float) -> None:
    """Each end hears that the other one belongs to this link: gloo's own port asks whoever comes for a small number.

    The source first, to nobody but who may then answer. Raises: RuntimeError.
    """
    if rank == SOURCE:
        pair.send(_on(device, tokens.source)).finish(timeout_s)
        _require(pair, tokens.destination, device, timeout_s)
    else:
        _require(pair, tokens.source, device, timeout_s)
        pair.send(_on(device, tokens.destination)).finish(timeout_s)


def resolve(host: str) -> str:
    """Raises: OSError."""
    return str(socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)[0][4][0])


def own_address_towards(host: str) -> str:
    """This machine's own address on the way there. Raises: OSError."""
    address = resolve(host)
    with socket.socket(_family(address), socket.SOCK_DGRAM) as route:
        route.connect((address, 1))  # sends nothing; picks the interface
        own_address: str = route.getsockname()[0]
    return own_address


class GlooPair:
    def __init__(self, store: Store, rank: int, own_address: str, timeout_s: float) -> None:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        # Given its address, gloo does not resolve this machine's host name.
        options._devices = [ProcessGroupGloo.create_device(hostname=own_address, lazy_init=False)]
        options._timeout = timedelta(seconds=timeout_s / _GLOO_PATIENCE)
        options._threads = 1
        self._peer = 1 - rank
        self._store = store  # see PairStore
        self._group = cast(ProcessGroup, ProcessGroupGloo(store, rank, 2, options))

    def send(self, flat: Tensor) -> GlooMoving:
        return GlooMoving(self._group.send([flat], self._peer, _PAYLOAD_TAG), flat)

    def receive(self, flat: Tensor) -> GlooMoving:
        return GlooMoving(self._group.recv([flat], self._peer, _PAYLOAD_TAG), flat)

    def abort(self) -> None:
        """A timeout anywhere closes a gloo pair on both sides, and nothing else does."""
        with suppress(RuntimeError):
            self._group.recv([torch.empty(1, dtype=torch.uint8)], self._peer, _WAKE_TAG).wait(timedelta(milliseconds=1))

    def let_go(self) -> None:
        del self._group


@dataclass(frozen=True)
class GlooMoving:
    work: Work
    flat: Tensor  # kept until then

    def finish(self, timeout_s: float) -> None:
        self.work.wait(timedelta(seconds=timeout_s))


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
        self._store = store  # see PairStore
        self.is_aborted = False

    def send(self, flat: Tensor) -> NcclMoving:
        with torch.cuda.stream(self._stream):
            return NcclMoving(self, self._group.send([flat], self._peer, _PAYLOAD_TAG), flat)

    def receive(self, flat: Tensor) -> NcclMoving:
        self._stream.wait_stream(torch.cuda.default_stream(self._device))  # whoever last used this memory is done
        with torch.cuda.stream(self._stream):
            return NcclMoving(self, self._group.recv([flat], self._peer, _PAYLOAD_TAG), flat)

    def abort(self) -> None:
        self.is_aborted = True
        self._group.abort()

    def let_go(self) -> None:
        del self._group


@dataclass(frozen=True)
class NcclMoving:
    pair: NcclPair
    work: Work
    flat: Tensor  # kept until then

    def finish(self, timeout_s: float) -> None:
        """NCCL's own wait only orders streams; the host must know, or the memory would be reused under the copy."""
        deadline_s = time.monotonic() + timeout_s
        while not self.work.is_completed():
            if self.pair.is_aborted:
                raise RuntimeError("the NCCL pair was aborted")
            if time.monotonic() > deadline_s:
                self.pair.abort()
                raise RuntimeError(f"NCCL has not moved the payload within {timeout_s} s")
            time.sleep(_NCCL_POLL_S)
        self.work.wait()  # raises if it completed by failing


def _on(device: torch.device, token: bytes) -> Tensor:
    return torch.frombuffer(bytearray(token), dtype=torch.uint8).to(device)


def _require(pair: Pair, token: bytes, device: torch.device, timeout_s: float) -> None:
    shown = torch.empty(len(token), dtype=torch.uint8, device=device)
    pair.receive(shown).finish(timeout_s)
    if not hmac.compare_digest(shown.cpu().numpy().tobytes(), token):
        raise RuntimeError("a stranger is at the other end of the pair")


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
