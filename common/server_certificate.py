"""The certificate of the public servers, read again when its files change."""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from common.errors import ConfigError
from common.tls_files import CertificateFiles, require_usable

logger = logging.getLogger(__name__)

Clock = Callable[[], float]

CHECK_EVERY_S = 1.0


@dataclass(frozen=True)
class _Certificate:
    http: ssl.SSLContext
    grpc: grpc.ServerCertificateConfiguration


class ServerCertificate:
    """For both APIs. A new version that cannot be used changes nothing, and is complained of once."""

    def __init__(self, files: CertificateFiles, clock: Clock = time.monotonic) -> None:
        """Raises: ConfigError when there is no usable certificate to begin with."""
        self._files = files
        self._clock = clock
        self._checked_s = clock()
        self._version = _version(files)
        self._current = _read(files)

    def http_context(self) -> ssl.SSLContext:
        """For a server's whole life: each handshake takes the newest certificate."""

        def renew(connection: ssl.SSLObject | ssl.SSLSocket, _: str | None, __: ssl.SSLContext) -> None:
            connection.context = self._newest().http

        context = require_usable(self._files)
        context.sni_callback = renew  # called in every handshake, whether or not the client names its server
        return context

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """As above."""
        return grpc.dynamic_ssl_server_credentials(self._current.grpc, lambda: self._newest().grpc)

    def _newest(self) -> _Certificate:
        """From any thread: at worst two of them read the same files."""
        now = self._clock()
        if now - self._checked_s < CHECK_EVERY_S:
            return self._current
        self._checked_s = now
        version = _version(self._files)
        if version == self._version:
            return self._current
        self._version = version
        try:
            self._current = _read(self._files)
        except ConfigError as error:
            logger.error("the certificate stays as it was: %s", error)
        else:
            logger.info("read a new certificate from %s", self._files.certificate)
        return self._current


def _read(files: CertificateFiles) -> _Certificate:
    """One that is replaced in between ends as two halves that do not belong together, or is read again."""
    return _Certificate(require_usable(files), grpc.ssl_server_certificate_configuration([files.read()]))


def _version(files: CertificateFiles) -> tuple[int, ...]:
    """Empty while one of the files is missing."""
    try:
        stats = (files.certificate.stat(), files.key.stat())
    except OSError:
        return ()
    return tuple(number for stat in stats for number in (stat.st_mtime_ns, stat.st_size, stat.st_ino))
