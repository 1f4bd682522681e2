"""API keys: a file of hashes, read again whenever it changes, and what a caller's key stands for.

    {"name": "alice", "sha256": "5e88...", "requests_per_minute": 60, "tokens_per_minute": 100000}

One JSON object a line; empty lines and lines that begin with # are passed over. A name may have several keys, so that
one can be replaced while both work; its limits must then be the same on each line.
"""

from __future__ import annotations

import hmac
import json
import logging
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.errors import ConfigError, Unauthorized
from router.tenant import RateLimits, Tenant

logger = logging.getLogger(__name__)

KEY_PREFIX = "pd-"
KEY_BYTES = 32
CHECK_EVERY_S = 1.0  # how long a change of the file may go unnoticed

PerMinute = Annotated[int, Field(ge=1)]
Clock = Callable[[], float]


class KeyLine(BaseModel):
    """A line of the file. The key itself is nowhere: with 256 random bits, a plain hash of it cannot be guessed."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._@-]{1,64}$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    requests_per_minute: PerMinute | None = None
    tokens_per_minute: PerMinute | None = None

    @property
    def limits(self) -> RateLimits:
        return RateLimits(self.requests_per_minute, self.tokens_per_minute)


@dataclass(frozen=True)
class NewKey:
    key: str  # for the client; kept nowhere
    line: str  # for the file


def new_key(name: str, limits: RateLimits) -> NewKey:
    """Raises: ConfigError for a name or a limit that the file could not hold."""
    key = KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)
    fields = {"name": name, "sha256": _hash(key).hex(), **vars(limits)}
    line = json.dumps({field: value for field, value in fields.items() if value is not None})
    _parse_line(line)
    return NewKey(key, line)


class KeyFile:
    """Who may call. A new version of the file that is wrong changes nothing, and is complained of once."""

    def __init__(self, path: Path, salt_of: Callable[[str], bytes], clock: Clock = time.monotonic) -> None:
        """salt_of: a tenant's cache salt, by name. Raises: ConfigError when there is no valid file to begin with."""
        self._path = path
        self._salt_of = salt_of
        self._clock = clock
        self._checked_s = clock()
        self._version = _version(path)
        self._tenants = self._read()

    def authenticate(self, authorization: str | None) -> Tenant:
        """authorization: the header of that name. Raises: Unauthorized."""
        self._reread_if_changed()
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthorized("no API key was sent; it belongs into the header `Authorization: Bearer KEY`")
        tenant = self._tenants.find(_hash(key.strip()))
        if tenant is None:
            raise Unauthorized("this API key is not known here")
        return tenant

    def _reread_if_changed(self) -> None:
        now = self._clock()
        if now - self._checked_s < CHECK_EVERY_S:
            return
        self._checked_s = now
        version = _version(self._path)
        if version == self._version:
            return
        self._version = version
        try:
            self._tenants = self._read()
        except ConfigError as error:
            logger.error("the API keys stay as they were: %s", error)
        else:
            logger.info("read %d API keys from %s", len(self._tenants), self._path)

    def _read(self) -> _Tenants:
        try:
            text = self._path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"router.api_keys_file: cannot read {self._path}: {error}") from error
        try:
            return _Tenants(parse_keys(text), self._salt_of)
        except ConfigError as error:
            raise ConfigError(f"router.api_keys_file: {self._path}: {error}") from error


class _Tenants:
    """Tenants by the hash of their key.

    Found by the first bytes of the hash, then compared as a whole in constant time. A caller cannot steer the hash of
    what it sends, so which bucket it hits tells it nothing about a key.
    """

    def __init__(self, lines: Iterable[KeyLine], salt_of: Callable[[str], bytes]) -> None:
        self._buckets: dict[bytes, list[tuple[bytes, Tenant]]] = {}
        for line in lines:
            digest = bytes.fromhex(line.sha256)
            tenant = Tenant(line.name, line.limits, salt_of(line.name))
            self._buckets.setdefault(digest[:4], []).append((digest, tenant))

    def __len__(self) -> int:
        return sum(map(len, self._buckets.values()))

    def find(self, digest: bytes) -> Tenant | None:
        found = None
        for candidate, tenant in self._buckets.get(digest[:4], ()):
            if hmac.compare_digest(candidate, digest):
                found = tenant
        return found


def parse_keys(text: str) -> list[KeyLine]:
    """Raises: ConfigError naming the line. An empty file is valid: nobody may call."""
    lines: list[KeyLine] = []
    limits: dict[str, RateLimits] = {}
    hashes: set[str] = set()
    for number, content in enumerate(text.splitlines(), start=1):
        if not content.strip() or content.lstrip().startswith("#"):
            continue
        try:
            line = _parse_line(content)
        except ConfigError as error:
            raise ConfigError(f"line {number}: {error}") from error
        if line.sha256 in hashes:
            raise ConfigError(f"line {number}: this hash stands there twice")
        if limits.setdefault(line.name, line.limits) != line.limits:
            raise ConfigError(f"line {number}: {line.name} has other limits on an earlier line")
        hashes.add(line.sha256)
        lines.append(line)
    return lines


def _parse_line(content: str) -> KeyLine:
    try:
        return KeyLine.model_validate_json(content)
    except ValidationError as error:
        problem = error.errors()[0]
        field = ".".join(str(part) for part in problem["loc"])
        raise ConfigError(f"{field}: {problem['msg']}" if field else problem["msg"]) from error


def _hash(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogateescape")).digest()


def _version(path: Path) -> tuple[int, int, int] | None:
    """None while there is no such file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
