"""Who is let in, and how much: a caller's key becomes a tenant before anything of its request is read."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol

from common.config import ServeConfig
from common.errors import ServingError
from router.api_keys import KeyFile
from router.rate_limit import RateLimiter
from router.request import Request
from router.tenant import ANONYMOUS, Tenant, cache_salt

SALT_SECRET_BYTES = 32


class Keys(Protocol):
    """router/api_keys.py has the ones of a file."""

    def authenticate(self, authorization: str | None) -> Tenant:
        """authorization: the header or metadata of that name. Raises: Unauthorized."""


class Everybody:
    """Where no keys are configured."""

    def authenticate(self, authorization: str | None) -> Tenant:
        return ANONYMOUS


class Gate:
    def __init__(self, keys: Keys, limiter: RateLimiter, on_refusal: Callable[[ServingError], None]) -> None:
        self._keys = keys
        self._limiter = limiter
        self._on_refusal = on_refusal

    def tenant(self, authorization: str | None) -> Tenant:
        """Raises: Unauthorized."""
        with self._reporting():
            return self._keys.authenticate(authorization)

    def require_room(self, tenant: Tenant) -> None:
        """Whether it is worth reading a request of this tenant's. Raises: RateLimited."""
        with self._reporting():
            self._limiter.require_room(tenant)

    @contextmanager
    def reserved(self, request: Request) -> Iterator[None]:
        """Holds what the request may use for the length of the block. Raises: RateLimited on entry."""
        with self._reporting():
            reserved = self._limiter.reserve(request)
        try:
            yield
        finally:
            self._limiter.settle(request, reserved)

    def limit_headers(self, tenant: Tenant) -> dict[str, str]:
        return self._limiter.headers(tenant)

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except ServingError as error:
            self._on_refusal(error)
            raise


def make_gate(config: ServeConfig, on_refusal: Callable[[ServingError], None]) -> Gate:
    """Raises: ConfigError when the file of keys, or the secret that its salts derive from, cannot be read."""
    path = config.router.api_keys_file
    if path is None:
        return open_gate()
    # with the cluster's secret all routers salt alike; without one each finds only what it had computed itself
    secret = config.cluster_secret() or secrets.token_bytes(SALT_SECRET_BYTES)
    salt_of = _no_salt if config.router.share_prefix_cache else partial(cache_salt, secret)
    return Gate(KeyFile(path, salt_of), RateLimiter(), on_refusal)


def open_gate() -> Gate:
    """For everybody, without limits."""
    return Gate(Everybody(), RateLimiter(), lambda _: None)


def _no_salt(_: str) -> bytes:
    return b""
