"""Memory of the KV cache is there before it is written, and what is in it stays."""

from __future__ import annotations

import resource
import sys
import weakref

import pytest
import torch

from engine.populate import CHUNK_BYTES, populate_in_background

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the call")

NUM_BYTES = 64 << 20


def _page_faults() -> int:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt + usage.ru_majflt


def _filled(num_bytes: int) -> torch.Tensor:
    tensor = torch.empty(num_bytes, dtype=torch.uint8)
    tensor[:100], tensor[-100:] = 7, 9
    return tensor


def test_the_first_writes_find_their_pages() -> None:
    populated, untouched = torch.empty(NUM_BYTES, dtype=torch.uint8), torch.empty(NUM_BYTES, dtype=torch.uint8)
    thread = populate_in_background(populated)
    assert thread is not None
    thread.join(60)
    assert not thread.is_alive()
    start = _page_faults()
    populated[::4096] = 1
    between = _page_faults()
    untouched[::4096] = 1
    end = _page_faults()
    if end - between < NUM_BYTES // 4096 // 2:
        pytest.skip("this system gives large pages unasked")
    assert between - start < (end - between) / 10


def test_what_is_there_stays() -> None:
    tensor = _filled(NUM_BYTES)
    thread = populate_in_background(tensor)
    assert thread is not None
    thread.join(60)
    assert tensor[:100].eq(7).all()
    assert tensor[-100:].eq(9).all()


@pytest.mark.parametrize("num_bytes", [0, 1, 4096, CHUNK_BYTES + 3])
def test_any_size(num_bytes: int) -> None:
    thread = populate_in_background(torch.empty(num_bytes, dtype=torch.uint8))
    assert thread is not None
    thread.join(60)
    assert not thread.is_alive()


def test_it_does_not_keep_the_memory() -> None:
    tensor = torch.empty(1 << 33, dtype=torch.uint8)  # more than it can be through with by then
    thread = populate_in_background(tensor)
    gone = weakref.ref(tensor)
    del tensor
    assert thread is not None
    thread.join(60)
    assert not thread.is_alive()
    assert gone() is None
