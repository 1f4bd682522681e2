"""The console script `pdserve`: nothing but a net under the imports, which take long enough to be interrupted."""

from __future__ import annotations


def main() -> int:
    try:
        from cluster.cli import main as run

        return run()
    except KeyboardInterrupt:
        return 130
