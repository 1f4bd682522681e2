"""A run that serves nobody but the command that starts it, and disturbs nothing that serves here already."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.plan import LOOPBACK
from cluster.up import UpOptions
from router.api_keys import new_key
from router.tenant import RateLimits


@contextmanager
def private_run(options: UpOptions) -> Iterator[tuple[UpOptions, str]]:
    """The same on free ports, unless the command line named some, on loopback, where its own caller needs no
    certificate that fits, and with an API key that nobody else has."""
    free = {key: port or 0 for key, port in options.overrides.ports.items()}
    with _key_file() as (path, key):
        router = options.config.router.model_copy(update={"api_keys_file": path, "host": LOOPBACK})
        security = options.config.security.model_copy(update={"tls": None})
        config = options.config.model_copy(update={"router": router, "security": security})
        overrides = dataclasses.replace(options.overrides, ports=free)
        yield dataclasses.replace(options, config=config, overrides=overrides), key


@contextmanager
def _key_file() -> Iterator[tuple[Path, str]]:
    """A file that lets in whoever has the one key."""
    made = new_key("pdserve", RateLimits())
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.write(made.line)
        file.flush()
        yield Path(file.name), made.key
