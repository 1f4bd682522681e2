"""Where the ends of a pair find each other, without a port: what one says, the link's proven stream carries over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store


class PairStore(Store):
    """One end's half of torch.distributed's rendezvous. gloo and NCCL call it from C++, on the thread that uses them.

    Refer to it for as long as its process group lives: C++ calls methods of this very object.
    """

    def __init__(self, on_said: Callable[[str, bytes], None], timeout_s: float) -> None:
        """on_said: called with what this end wants the other one to know. timeout_s: for the other end to say it."""
        super().__init__()
        self._on_said = on_said
        self._timeout_s = timeout_s
        self._entries: dict[str, bytes] = {}
        self._has_changed = threading.Condition()  # reentrant
        self._is_closed = False

    def hear(self, key: str, value: bytes) -> None:
        """From the other end."""
        with self._has_changed:
            self._entries[key] = value
            self._has_changed.notify_all()

    def close(self) -> None:
        """End whatever waits."""
        with self._has_changed:
            self._is_closed = True
            self._has_changed.notify_all()

    def set(self, key: str, value: str | bytes) -> None:
        said = value.encode() if isinstance(value, str) else bytes(value)
        self.hear(key, said)
        self._on_said(key, said)

    def get(self, key: str) -> bytes:
        """Raises: RuntimeError."""
        self.wait([key])
        return self._entries[key]

    def check(self, keys: Sequence[str]) -> bool:
        with self._has_changed:
            return all(key in self._entries for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Raises: RuntimeError."""
        with self._has_changed:
            self._has_changed.wait_for(lambda: self._is_closed or self.check(keys), self._timeout_s)
            if self._is_closed or not self.check(keys):
                raise RuntimeError("the other end of the pair has not come")
