"""Whose request it is. Requests of one tenant share its limits, its turn in the queue and its prefix cache."""

from __future__ import annotations

import hmac
from dataclasses import dataclass

SALT_BYTES = 16


@dataclass(frozen=True)
class RateLimits:
    """None: as much as the workers can do."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # of prompts and answers


@dataclass(frozen=True)
class Tenant:
    name: str
    limits: RateLimits = RateLimits()
    cache_salt: bytes = b""  # prompts of different salts never share cached KV


ANONYMOUS = Tenant("anonymous")  # everybody, where no keys are configured


def cache_salt(secret: bytes, name: str) -> bytes:
    """The same on every router that knows `secret`, and nothing that a tenant could guess of another's."""
    return hmac.digest(secret, b"pdserve prefix cache of " + name.encode(), "sha256")[:SALT_BYTES]
