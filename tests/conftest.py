"""Triton reads its switch when it is first imported, and transformers' models import it: so this comes before both."""

from __future__ import annotations

import os
from pathlib import Path

if not Path("/proc/driver/nvidia").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels run on the CPU, in numpy
