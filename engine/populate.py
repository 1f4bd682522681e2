"""Memory that the system has promised but not given yet, asked for while the CPU has nothing better to do.

A page is given at its first write, zeroed, and in a virtual machine the host may have to find it first: 2 to 35 µs for
4 KiB were seen. A cache that grows under load would pay that in its steps.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import sys
import threading
import weakref

from torch import Tensor

logger = logging.getLogger(__name__)

MADV_HUGEPAGE, MADV_POPULATE_WRITE = 14, 23  # Linux, <asm-generic/mman-common.h>; the second since 5.14
CHUNK_BYTES = 2 << 20  # what is asked for at once: one large page on x86
LOWEST_PRIORITY = 19


def populate_in_background(tensor: Tensor) -> threading.Thread | None:
    """What is in the tensor stays as it is, whoever writes to it meanwhile. Ends early when the tensor is gone.

    None where there is nothing to do: on a GPU, or on a system that has no such call.
    """
    if tensor.device.type != "cpu" or sys.platform != "linux":
        return None
    _advise(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, MADV_HUGEPAGE)
    thread = threading.Thread(target=_populate, args=(weakref.ref(tensor),), name="populate", daemon=True)
    thread.start()
    return thread


def _populate(reference: weakref.ref[Tensor]) -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)  # Linux: of this thread only
    offset = 0
    while (tensor := reference()) is not None and offset < tensor.nbytes:
        start = tensor.data_ptr() + offset
        end = min(start + CHUNK_BYTES, tensor.data_ptr() + tensor.nbytes)
        if not _advise(start, end, MADV_POPULATE_WRITE):
            return  # an older kernel: pages come when they are written
        offset += CHUNK_BYTES
        del tensor  # whoever drops the last other reference should not have to wait for this loop


def _advise(start: int, end: int, advice: int) -> bool:
    """For the whole pages between two addresses; the lock of the interpreter is not held meanwhile. False: the system
    does not know the advice, or has no such memory."""
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if first >= last:
        return True
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), ctypes.c_int(advice))
    if failed:
        logger.debug("madvise(%d) failed: %s", advice, os.strerror(ctypes.get_errno()))
    return not failed
