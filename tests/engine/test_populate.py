"""Memory of the KV cache is there before it is written, and what is in it stays."""

from __future__ import annotations

import resource
import sys

import pytest
import torch

from engine.populate import CHUNK_BYTES, populate

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the call")

NUM_BYTES = 64 << 20
ENOUGH_S = 60.0


def _page_faults() -> int:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt + usage.ru_majflt


def test_the_first_writes_find_their_pages() -> None:
    populated, untouched = torch.empty(NUM_BYTES, dtype=torch.uint8), torch.empty(NUM_BYTES, dtype=torch.uint8)
    assert populate(populated, ENOUGH_S) == NUM_BYTES
    start = _page_faults()
    populated[::4096] = 1
    between = _page_faults()
    untouched[::4096] = 1
    end = _page_faults()
    if end - between < NUM_BYTES // 4096 // 2:
        pytest.skip("this system gives large pages unasked")
    assert between - start < (end - between) / 10


def test_what_is_there_stays() -> None:
    tensor = torch.empty(NUM_BYTES, dtype=torch.uint8)
    tensor[:100], tensor[-100:] = 7, 9
    assert populate(tensor, ENOUGH_S) == NUM_BYTES
    assert tensor[:100].eq(7).all()
    assert tensor[-100:].eq(9).all()


@pytest.mark.parametrize("num_bytes", [0, 1, 4096, CHUNK_BYTES + 3])
def test_any_size(num_bytes: int) -> None:
    assert populate(torch.empty(num_bytes, dtype=torch.uint8), ENOUGH_S) == num_bytes


def test_it_ends_when_its_time_has_passed() -> None:
    assert populate(torch.empty(NUM_BYTES, dtype=torch.uint8), 0.0) == 0
