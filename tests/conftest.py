"""What holds for every test."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import settings

settings.register_profile("busy-machine", deadline=None)  # wall-clock deadlines fail where cores are shared
settings.load_profile("busy-machine")

# Triton reads its switch when it is first imported, and transformers' models import it: so this comes before both.
if not Path("/proc/driver/nvidia").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels run on the CPU, in numpy
