"""Staging memory of one link: a ring that pieces land in, and whose free space is the source's credit.

    free │ taken, oldest first │ free          a piece is contiguous: one that does not fit before the end starts over,
         tail                  head            and what is skipped stays unused until the ring has gone round

A source never has more than the window under way, so that with one largest piece of slack every piece finds its place.
Pieces begin at multiples of ALIGNMENT, and credit is counted in such steps too (`staged_bytes`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from common.errors import CorruptPiece
from kv_transfer.wire import MAX_PIECE_BYTES

ALIGNMENT = 64  # a cache line; and tensors of any dtype may begin there


class StagingOverrun(CorruptPiece):
    """The source sent more than it had credit for; crosses the wire as CorruptPiece."""


@dataclass
class _Taken:
    start: int
    num_bytes: int
    is_released: bool = False


class Staging(Protocol):
    """Where a link's pieces land. Safe from any thread."""

    def take(self, num_bytes: int) -> Staged:
        """Raises: StagingOverrun."""


class FreshStaging:
    """For a source that counts no credit (protocol version 1): as much as is being received at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def take(self, num_bytes: int) -> Staged:
        if num_bytes > MAX_PIECE_BYTES:
            raise StagingOverrun(f"a piece announces {num_bytes} bytes; {MAX_PIECE_BYTES} are the most")
        return Staged(torch.empty(num_bytes, dtype=torch.uint8, device=self._device), 0, lambda: None)


class StagingRing:
    """`window_bytes` of pieces at a time, each at most MAX_PIECE_BYTES. Safe from any thread.

    on_freed: called with the bytes that may be sent again; from whichever thread released them. Space is freed in the
    order in which it was taken, so that both ends of a link can keep the same ring by counting bytes.
    """

    def __init__(self, memory: Tensor, on_freed: Callable[[int], None]) -> None:
        """memory: [ring_bytes(window_bytes)] uint8."""
        self.memory = memory
        self._on_freed = on_freed
        self._taken: deque[_Taken] = deque()
        self._num_taken_bytes = 0  # their sum
        self._lock = threading.Lock()

    @property
    def num_taken_bytes(self) -> int:
        return self._num_taken_bytes

    def take(self, num_bytes: int) -> Staged:
        """Raises: StagingOverrun if there is no such place, which credit rules out."""
        staged = self.take_if_room(num_bytes)
        if staged is None:
            raise StagingOverrun(f"a piece of {num_bytes} bytes came without credit for it")
        return staged

    def take_if_room(self, num_bytes: int) -> Staged | None:
        with self._lock:
            start = self._place(staged_bytes(num_bytes))
            if start is None:
                return None
            taken = _Taken(start, staged_bytes(num_bytes))
            self._taken.append(taken)
            self._num_taken_bytes += taken.num_bytes
        return Staged(self.memory[start : start + num_bytes], start, lambda: self._release(taken))

    def _place(self, num_bytes: int) -> int | None:
        if not self._taken:  # start over: memory used a moment ago is still in the CPU's caches
            head = tail = 0
        else:
            tail, newest = self._taken[0].start, self._taken[-1]
            head = newest.start + newest.num_bytes
            if newest.start < tail:  # wrapped
                return head if head + num_bytes <= tail else None
        if head + num_bytes <= self.memory.numel():
            return head
        return 0 if num_bytes <= tail else None

    def _release(self, taken: _Taken) -> None:
        freed = 0
        with self._lock:
            taken.is_released = True
            while self._taken and self._taken[0].is_released:
                freed += self._taken.popleft().num_bytes
            self._num_taken_bytes -= freed
        if freed:
            self._on_freed(freed)


@dataclass(frozen=True)
class Staged:
    """A place in the ring, the taker's own until `release`."""

    flat: Tensor  # [num_bytes] uint8
    offset: int  # in the ring
    release: Callable[[], None]


def staged_bytes(num_bytes: int) -> int:
    """What a piece of num_bytes takes of the ring, and of the credit."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def ring_bytes(window_bytes: int) -> int:
    return window_bytes + MAX_PIECE_BYTES


def new_ring(window_bytes: int, device: torch.device, on_freed: Callable[[int], None]) -> StagingRing:
    """The memory is not touched before it is used, so an idle link costs nothing."""
    memory = torch.empty(ring_bytes(window_bytes), dtype=torch.uint8, device=device)
    return StagingRing(memory, on_freed)
