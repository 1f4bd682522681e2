"""The staging ring: within the source's credit every piece finds a place, and no two pieces share one."""

from __future__ import annotations

import threading
from collections import deque
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.errors import CorruptPiece
from kv_transfer.staging import ALIGNMENT, FreshStaging, Staged, StagingOverrun, StagingRing, ring_bytes, staged_bytes
from kv_transfer.wire import MAX_PIECE_BYTES

WINDOW, LARGEST = 4096, 1024


class Model:
    """Both ends' view of one ring: the source takes credit for each piece, releases give it back."""

    def __init__(self) -> None:
        self.ring = StagingRing(torch.zeros(WINDOW + LARGEST, dtype=torch.uint8), self._on_freed)
        self.credit = WINDOW
        self.live: list[tuple[Staged, int]] = []  # with the byte that each is filled with
        self._stamps = iter(range(1, 1 << 30))

    def take(self, num_bytes: int) -> bool:
        """False: a source would wait for credit."""
        if staged_bytes(num_bytes) > self.credit:
            return False
        self.credit -= staged_bytes(num_bytes)
        staged = self.ring.take(num_bytes)
        stamp = next(self._stamps) % 251 + 1
        staged.flat.fill_(stamp)
        self.live.append((staged, stamp))
        return True

    def release(self, index: int) -> None:
        staged, _ = self.live.pop(index % len(self.live))
        staged.release()

    def check(self) -> None:
        memory = self.ring.memory
        assert self.ring.num_taken_bytes + self.credit == WINDOW
        for staged, stamp in self.live:
            assert staged.offset % ALIGNMENT == 0
            assert staged.flat.data_ptr() == memory.data_ptr() + staged.offset
            assert bool((staged.flat == stamp).all()), "another piece was put over it"

    def _on_freed(self, num_bytes: int) -> None:
        self.credit += num_bytes


@given(st.lists(st.one_of(st.integers(1, LARGEST), st.integers(-8, -1)), max_size=120))
def test_within_its_credit_a_source_always_finds_a_place_of_its_own(steps: list[int]) -> None:
    """A positive step is a piece of that size, a negative one the release of some piece."""
    model = Model()
    for step in steps:
        if step > 0:
            model.take(step)
        elif model.live:
            model.release(-step)
        model.check()
    while model.live:
        model.release(0)
    assert (model.credit, model.ring.num_taken_bytes) == (WINDOW, 0)


@given(st.lists(st.integers(1, LARGEST), min_size=1, max_size=60), st.integers(1, 12))
def test_released_in_order_two_rings_that_count_the_same_bytes_stay_equal(sizes: list[int], num_live: int) -> None:
    one, other = (StagingRing(torch.zeros(WINDOW + LARGEST, dtype=torch.uint8), lambda _: None) for _ in range(2))
    live: deque[tuple[Staged, Staged]] = deque()
    for size in sizes:
        while len(live) >= num_live or one.num_taken_bytes + staged_bytes(size) > WINDOW:
            for staged in live.popleft():
                staged.release()
        live.append((one.take(size), other.take(size)))
        assert live[-1][0].offset == live[-1][1].offset
        assert one.num_taken_bytes == other.num_taken_bytes


def test_more_than_there_is_room_for_is_refused_and_changes_nothing() -> None:
    model = Model()
    for _ in range(WINDOW // LARGEST):
        assert model.take(LARGEST)
    model.ring.take(LARGEST)  # the slack; a source with credit never gets here
    taken = model.ring.num_taken_bytes
    with pytest.raises(StagingOverrun):
        model.ring.take(1)
    assert issubclass(StagingOverrun, CorruptPiece)
    assert model.ring.num_taken_bytes == taken
    assert all(bool((staged.flat == stamp).all()) for staged, stamp in model.live)


def test_releases_from_many_threads_free_every_byte_once() -> None:
    freed: list[int] = []
    ring = StagingRing(torch.empty(1 << 20, dtype=torch.uint8), freed.append)
    places = [ring.take(1 + 37 * index % 999) for index in range(800)]
    total = ring.num_taken_bytes
    Random(1).shuffle(places)

    def release(part: list[Staged]) -> None:
        for place in part:
            place.release()

    threads = [threading.Thread(target=release, args=(places[start::4],)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(freed) == total
    assert ring.num_taken_bytes == 0


def test_memory_for_a_source_without_credit_is_bounded_piece_by_piece() -> None:
    staging = FreshStaging(torch.device("cpu"))
    assert staging.take(MAX_PIECE_BYTES).flat.numel() == MAX_PIECE_BYTES
    with pytest.raises(StagingOverrun):
        staging.take(MAX_PIECE_BYTES + 1)


def test_the_ring_is_the_window_and_one_largest_piece() -> None:
    assert ring_bytes(WINDOW) == WINDOW + MAX_PIECE_BYTES
