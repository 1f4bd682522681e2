"""python -m prefill_worker --config serve.yaml --router 127.0.0.1:8002 [--name prefill-0]"""

from __future__ import annotations

import sys

from common.config import Role
from common.process import run_process, worker_options
from prefill_worker.server import PrefillServer


def main() -> int:
    options = worker_options("prefill_worker", roles=(Role.PREFILL,))
    return run_process(options.name, lambda: PrefillServer.start(options.config(), options.name, options.routers))


if __name__ == "__main__":
    sys.exit(main())
