"""common/pb is what scripts/generate_pb.sh makes of proto/, to the byte."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_generated_code_matches_the_protos(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHON": sys.executable}
    subprocess.run([ROOT / "scripts" / "generate_pb.sh", tmp_path], env=environment, check=True, timeout=60)
    fresh = {file.name: file.read_bytes() for file in (tmp_path / "common" / "pb").iterdir()}
    committed = {
        file.name: file.read_bytes()
        for file in (ROOT / "common" / "pb").iterdir()
        if file.is_file() and file.name != "__init__.py"
    }
    stale = sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))
    assert stale == [], "run `make proto` and commit what changes"
