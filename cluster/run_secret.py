"""What the processes of one run prove to each other that they know: a configured secret, or a new one for each run."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.plan import Plan
from common.errors import ConfigError

SECRET_BYTES = 32


@contextmanager
def with_secret(plan: Plan, folder: Path) -> Iterator[Plan]:
    """The plan with a secret to read: the configured file, or a new one in `folder` that is removed at the end.

    Processes are told the path alone, so no argument list, environment or config shows the secret.
    Raises: ConfigError when the configured one cannot be read or the new one cannot be written.
    """
    if plan.config.security.secret_file is not None:
        plan.config.cluster_secret()  # a mistake is told before anything has started
        yield plan
        return
    path = folder.resolve() / "secret"
    _write_private(path, secrets.token_hex(SECRET_BYTES))
    try:
        yield plan.with_secret_file(path)
    finally:
        path.unlink(missing_ok=True)


def _write_private(path: Path, text: str) -> None:
    """A new file that only its owner may read, from its first moment on."""
    try:
        path.unlink(missing_ok=True)  # of an earlier run with the same folder that was killed
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode=0o600), "w") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; choose another folder with --logs") from error
