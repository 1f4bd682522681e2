"""One log format for every process."""

from __future__ import annotations

import logging
import os
import sys


def setup_logging(process: str) -> None:
    """Log to stderr as `time level process logger message`; PDSERVE_LOG_LEVEL sets the level (default INFO)."""
    level = os.environ.get("PDSERVE_LOG_LEVEL", "INFO").upper()
    logging.basicConfig(
        stream=sys.stderr,
        level=level if level in logging.getLevelNamesMapping() else logging.INFO,
        format=f"%(asctime)s %(levelname).1s {process} %(name)s %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
    for chatty in ("httpx", "httpcore", "uvicorn.access", "asyncio", "transformers"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
