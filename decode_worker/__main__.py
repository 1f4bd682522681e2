"""python -m decode_worker --config serve.yaml --router 127.0.0.1:8002 [--name decode-0] [--colocated]"""

from __future__ import annotations

import sys

from common.config import Role
from common.process import run_process, worker_options
from decode_worker.server import DecodeServer


def main() -> int:
    options = worker_options("decode_worker", roles=(Role.DECODE, Role.COLOCATED))
    return run_process(
        options.name, lambda: DecodeServer.start(options.config(), options.name, options.routers, options.role)
    )


if __name__ == "__main__":
    sys.exit(main())
