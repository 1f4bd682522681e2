"""A destination's staging memory as a window that one source writes into, over NIXL. All but `abort` on one thread."""

from __future__ import annotations

import secrets
import struct
from collections import deque
from dataclasses import dataclass

from torch import Tensor

from common.errors import PeerLost
from kv_transfer.nixl_agent import NixlAgent


@dataclass(frozen=True)
class Window:
    """What a writer must know of a target. A secret: whoever has it can write."""

    address: int
    num_bytes: int
    writer_name: str  # 32 letters, for the one writer that the target listens to
    metadata: bytes  # the target agent's

    def encode(self) -> bytes:
        return _WINDOW_HEAD.pack(self.address, self.num_bytes, self.writer_name.encode()) + self.metadata

    @staticmethod
    def decode(encoded: bytes) -> Window:
        """Raises: PeerLost if these are not the bytes of a window."""
        try:
            address, num_bytes, writer_name = _WINDOW_HEAD.unpack_from(encoded)
            return Window(address, num_bytes, writer_name.decode(), encoded[_WINDOW_HEAD.size :])
        except (struct.error, UnicodeDecodeError) as error:
            raise PeerLost(f"the peer's window cannot be read: {error}") from error


_WINDOW_HEAD = struct.Struct("<QQ32s")


class NixlTarget:
    """Over TCP the peer's writes move only inside `wait`, which need not be called between transfers.

    That the writer died is not seen here: its control stream tells. `staging` and `net_device` as for NixlAgent.
    """

    def __init__(self, staging: Tensor, net_device: str | None) -> None:
        """Raises: ConfigError."""
        self._agent = NixlAgent(secrets.token_hex(16), staging, net_device)
        self._arrived: deque[bytes] = deque()  # told by the agent and not asked for yet
        self.window = Window(staging.data_ptr(), staging.numel(), secrets.token_hex(16), self._agent.metadata())

    def wait(self, timeout_s: float) -> bytes | None:
        """The next notification, or None within the time. Raises: PeerLost once aborted or closed.

        One for each write: where writes move without our help, several may have come since the last call.
        """

        def has_arrived() -> bool:
            self._arrived.extend(self._agent.notifications().get(self.window.writer_name, []))
            return bool(self._arrived)

        self._agent.wait_until(has_arrived, timeout_s)
        return self._arrived.popleft() if self._arrived else None

    def abort(self) -> None:
        """End a `wait`, from any thread."""
        self._agent.abort()

    def close(self) -> None:
        """Raises: MemoryInDoubt; else the staging memory is the caller's own again."""
        self._agent.close()


class NixlWriter:
    """Writes from its own staging memory into one target's. `staging` and `net_device` as for NixlAgent."""

    def __init__(self, window: Window, staging: Tensor, net_device: str | None) -> None:
        """Does not wait for the target. Raises: ConfigError if this host cannot; PeerLost if the window is nonsense."""
        self._window = window
        self._agent = NixlAgent(window.writer_name, staging, net_device)
        try:
            self._peer = self._agent.add_peer(window.metadata)
        except PeerLost:
            self._agent.close()
            raise

    def write(self, local: Tensor, offset: int, notification: bytes, timeout_s: float) -> None:
        """Return when `local`, a slice of the staging memory, is whole at `offset` of the target's.

        Raises: PeerLost. Then only `close` is left, and until then UCX may go on reading `local`.
        """
        self._agent.write(local, (self._window.address + offset, self._peer), notification, timeout_s)

    def abort(self) -> None:
        """End a `write`, from any thread."""
        self._agent.abort()

    def close(self) -> None:
        """Raises: MemoryInDoubt; else the staging memory is the caller's own again."""
        self._agent.close()
