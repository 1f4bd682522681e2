"""Memory that the system has promised but not given yet, asked for before it is needed.

A page is given at its first write, zeroed, and in a virtual machine the host may have to find it first: 2 to 35 µs for
4 KiB were seen. A cache that grows under load would pay that in its steps.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import sys
import time

from torch import Tensor

logger = logging.getLogger(__name__)

MADV_POPULATE_WRITE = 23  # Linux 5.14, <asm-generic/mman-common.h>
CHUNK_BYTES = 2 << 20  # what is asked for between two looks at the clock


def populate(tensor: Tensor, within_s: float) -> int:
    """How many bytes the system has given, all unless time ran out; the rest comes as it is written. What is in the
    tensor stays as it is. Nothing is done on a GPU, or on a system that has no such call."""
    if tensor.device.type != "cpu" or sys.platform != "linux":
        return 0
    start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    deadline_s = time.monotonic() + within_s
    while start < end and time.monotonic() < deadline_s:
        chunk_end = min(start + CHUNK_BYTES, end)
        if not _populate(start, chunk_end):
            break
        start = chunk_end
    return tensor.nbytes - (end - start)


def _populate(start: int, end: int) -> bool:
    """The whole pages between two addresses. False: the system does not know the advice, or has no such memory."""
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if first >= last:
        return True
    libc = ctypes.CDLL(None, use_errno=True)
    advice = ctypes.c_int(MADV_POPULATE_WRITE)
    failed = libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), advice)
    if failed:
        logger.debug("madvise failed: %s", os.strerror(ctypes.get_errno()))
    return not failed
