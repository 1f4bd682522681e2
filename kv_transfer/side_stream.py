"""GPU work that must not queue up behind the engine's: on a stream of its own, done when the block ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def side_stream(data: Tensor) -> Iterator[None]:
    """For tensors whose computation is over. Blocks a CUDA caller until the work is done, so belongs on a thread; does
    nothing for CPU tensors."""
    if not data.is_cuda:
        yield
        return
    stream = torch.cuda.Stream(data.device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def copy_to_host(flat: Tensor) -> Tensor:
    """A CUDA [num_bytes] uint8 tensor in pinned memory."""
    with side_stream(flat):
        host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        host.copy_(flat, non_blocking=True)
    return host
