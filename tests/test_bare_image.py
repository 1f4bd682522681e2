"""A GPU image holds little: the engine and the transfer run where every other package is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_an_engine_step_and_a_transfer_run_on_a_bare_gpu_image(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).with_name("bare_image.py")), str(tmp_path)]
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["refused", "imported", "generated", "transferred"]
