"""The other end of a NIXL link as a process of its own, so that a test can kill or freeze it.

python -m tests.kv_transfer.nixl_peer target                 prints its window; then every notification, and how many
                                                             bytes hold WRITTEN; "end" and how many on SIGTERM
python -m tests.kv_transfer.nixl_peer writer WINDOW COUNT    SIZE bytes each, all WRITTEN
"""

from __future__ import annotations

import signal
import sys

import torch

from kv_transfer.nixl_window import NixlTarget, NixlWriter, Window

SIZE = 8 << 20
LOOPBACK = "lo"
WRITTEN = 7


def target() -> None:
    staging = torch.zeros(SIZE, dtype=torch.uint8)
    target = NixlTarget(staging, LOOPBACK)
    print(target.window.encode().hex(), flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        while True:
            if (notification := target.wait(timeout_s=60)) is not None:
                print(notification.decode(), int((staging == WRITTEN).sum()), flush=True)
    except SystemExit:
        while target.wait(timeout_s=1) is not None:
            pass  # whatever is still on its way
        print("end", int((staging == WRITTEN).sum()), flush=True)


def writer(window: str, count: str) -> None:
    staging = torch.full((SIZE,), WRITTEN, dtype=torch.uint8)
    writer = NixlWriter(Window.decode(bytes.fromhex(window)), staging, LOOPBACK)
    for number in range(int(count)):
        writer.write(staging, 0, b"write %d" % number, timeout_s=60)


if __name__ == "__main__":
    mode, *arguments = sys.argv[1:]
    target() if mode == "target" else writer(*arguments)
