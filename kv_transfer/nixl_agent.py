"""A NIXL agent: memory lent to UCX, which moves bytes between processes over RDMA where there is any, else over TCP.

Everything here but `abort` belongs on the one thread that a link gives it. Who touches the lent memory, and until
when, as seen with nixl 1.5.1 over TCP (tests/kv_transfer/test_nixl_agent.py holds on to the last line):

| the target deregisters its memory      | a peer's writes still land in it                                 |
| the writer releases a write in flight  | UCX goes on reading, so whatever the memory holds by then is sent |
| an end destroys its agent              | its memory is left alone, be the peer alive, frozen or dead       |

So an agent lives as long as its link, and only `close` gives memory back. UCX's same-host transports break the last
line, as there the peer's process writes into ours without our help; they are switched off (`shm` is made for that).

For trusted networks only: over TCP, UCX checks neither who connects to its ports nor which address of this process
they write to.
"""

from __future__ import annotations

import logging
import os
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Protocol, cast

import torch
from torch import Tensor

from common.errors import ConfigError, PeerLost

logger = logging.getLogger(__name__)

_SHORTEST_NAP_S, _LONGEST_NAP_S = 0.00005, 0.0005
_NO_SAME_HOST = "TLS=^sm"  # UCX's name for all of them: CMA, KNEM, XPMEM, POSIX and System V memory


class MemoryInDoubt(RuntimeError):
    """The transport may still touch the memory that was lent to it: keep that, or its agent, for ever."""


class NixlAgent:
    """One end of a link, with one piece of memory lent to it."""

    def __init__(self, name: str, staging: Tensor, net_device: str | None) -> None:
        """staging: uint8 on the CPU; kept here, so that it is not freed before `close` has given it back.

        net_device: the one network interface that UCX listens on and sends through ("lo"), None for all.
        Raises: ConfigError.
        """
        assert (staging.device.type, staging.dtype, staging.is_contiguous()) == ("cpu", torch.uint8, True)
        self._staging: Tensor | None = staging
        self._nixl: _Nixl | None = _start(name, net_device)
        self._native = weakref.ref(self._nixl.agent)
        self._transfer: object = None
        self._is_registered = False
        self._is_aborted = False
        try:
            self._registered = self._nixl.register_memory(staging)
        except Exception as error:  # NIXL's errors have no base class of their own
            raise ConfigError(f"NIXL cannot register {staging.numel()} bytes of memory: {error}") from error
        self._is_registered = True

    def metadata(self) -> bytes:
        """Where this agent is, and the key to its memory."""
        return self._open().get_agent_metadata()

    def add_peer(self, metadata: bytes) -> str:
        """The peer's name. Waits for nobody. Raises: PeerLost if the metadata makes no sense."""
        with self._failures("NIXL refuses the peer's metadata"):
            return self._open().add_remote_agent(metadata)

    def notifications(self) -> dict[str, list[bytes]]:
        """What peers have told since the last call, by the name that each gives itself. Lets their writes proceed.

        Raises: PeerLost once aborted or closed.
        """
        with self._failures("NIXL cannot receive"):
            return self._open().get_new_notifs()

    def write(self, local: Tensor, remote: RemoteBytes, notification: bytes, timeout_s: float) -> None:
        """Return when `local`, a slice of the lent memory, is whole at the peer's.

        Raises: PeerLost. Then only `close` is left, and until then UCX may go on reading `local`.
        """
        assert local.is_contiguous()
        address, peer = remote
        with self._failures("a write to the peer failed"):
            source = self._open().get_xfer_descs(local)
            target = self._open().get_xfer_descs([(address, local.numel(), 0)], "DRAM")
            self._transfer = self._open().initialize_xfer("WRITE", source, target, peer, notification)
            if self._open().transfer(self._transfer) != "DONE" and not self.wait_until(self._is_written, timeout_s):
                raise TimeoutError(f"the peer has not taken {local.numel()} bytes within {timeout_s} s")
            self._open().release_xfer_handle(self._transfer)

    def wait_until(self, is_done: Callable[[], bool], timeout_s: float) -> bool:
        """False after `timeout_s`. Raises: PeerLost once aborted; whatever `is_done` raises.

        Naps between looks, longer as time goes by: the core that polling without them takes is one that the peer, or
        our own forward, may lack.
        """
        started_s = time.monotonic()
        while not is_done():
            waited_s = time.monotonic() - started_s
            if waited_s > timeout_s:
                return False
            time.sleep(min(max(_SHORTEST_NAP_S, waited_s / 10), _LONGEST_NAP_S))
            self._open()  # or aborted meanwhile
        return True

    def abort(self) -> None:
        """End whatever waits, from any thread; only `close` is left then."""
        self._is_aborted = True

    def close(self) -> None:
        """Destroy the agent, without waiting for the peer; then the memory is its owner's again.

        Raises: MemoryInDoubt, every time until the agent is proven to have ended.
        """
        if self._nixl is not None:
            try:
                self._nixl.deregister_memory(self._registered)
                self._is_registered = False
            except Exception as error:  # NIXL's errors have no base class of their own
                logger.warning("NIXL cannot deregister memory: %s", error)
            self._nixl = self._transfer = None  # the agent ends here, unless something else holds it
        if self._is_registered or self._native() is not None:
            raise MemoryInDoubt("a NIXL agent has not let go of its memory")
        self._staging = None

    def _is_written(self) -> bool:
        state = self._open().check_xfer_state(self._transfer)
        if state == "ERR":
            raise ConnectionError("UCX reports an error")
        return state == "DONE"

    def _open(self) -> _Nixl:
        """Never kept in a variable: an error's traceback would keep it too, and the agent could not end."""
        if self._nixl is None or self._is_aborted:
            raise PeerLost("the NIXL link has ended")
        return self._nixl

    @contextmanager
    def _failures(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # NIXL's errors have no base class of their own
            self._is_aborted = True
            traceback.clear_frames(error.__traceback__)  # NIXL's own variables hold the agent
            raise PeerLost(f"{what}: {error}") from error


RemoteBytes = tuple[int, str]  # their address in the peer, and its name


class _Nixl(Protocol):
    """What we use of `nixl._api.nixl_agent`, which comes without types."""

    agent: object  # the C++ agent, which ends with its last reference

    def create_backend(self, backend: str, initParams: dict[str, str]) -> None: ...
    def register_memory(self, reg_list: Tensor) -> object: ...
    def deregister_memory(self, dereg_list: object) -> None: ...
    def get_agent_metadata(self) -> bytes: ...
    def add_remote_agent(self, metadata: bytes) -> str: ...
    def get_xfer_descs(self, descs: Tensor | list[tuple[int, int, int]], mem_type: str | None = None) -> object: ...
    def initialize_xfer(
        self, operation: str, local_descs: object, remote_descs: object, remote_agent: str, notif_msg: bytes
    ) -> object: ...
    def transfer(self, handle: object) -> str: ...
    def check_xfer_state(self, handle: object) -> str: ...
    def release_xfer_handle(self, handle: object) -> None: ...
    def get_new_notifs(self) -> dict[str, list[bytes]]: ...


def require_nixl() -> None:
    """Raises: ConfigError when this process cannot use NIXL."""
    if "UCX_TLS" in os.environ:
        raise ConfigError("unset UCX_TLS: UCX would obey it rather than keep off its same-host transports")
    if find_spec("nixl") is None:
        raise ConfigError("the nixl transport needs NIXL: pip install 'pdserve[nixl]'")


def _start(name: str, net_device: str | None) -> _Nixl:
    require_nixl()
    raise_exceptions = logging.raiseExceptions
    try:
        from nixl._api import nixl_agent, nixl_agent_config
    except ImportError as error:
        raise ConfigError(f"NIXL is installed but cannot be loaded: {error}") from error
    finally:
        logging.raiseExceptions = raise_exceptions  # importing NIXL sets it for the whole process
    _quieten(logging.getLogger("nixl"))
    settings = _NO_SAME_HOST if net_device is None else f"{_NO_SAME_HOST},NET_DEVICES={net_device}"
    try:
        # NIXL's progress thread never sleeps: it would cost a core even when nothing moves.
        nixl = cast(_Nixl, nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=[])))
        nixl.create_backend("UCX", {"engine_config": settings})
    except Exception as error:  # NIXL's errors have no base class of their own
        raise ConfigError(f"UCX does not start on network device {net_device or '(any)'}: {error}") from error
    return nixl


def _quieten(logger: logging.Logger) -> None:
    """It comes with a handler of its own that writes to stdout."""
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.WARNING)
