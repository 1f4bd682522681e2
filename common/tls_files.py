"""PEM files, proved usable before anything relies on them.

A certificate is tried in a handshake with ourselves, in memory: OpenSSL then says by itself what is wrong with it.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError
from common.transfer_config import TlsFiles


@dataclass(frozen=True)
class CertificateFiles:
    """Of a server that anybody may call."""

    certificate: Path  # and below it in the file whatever leads to its authority
    key: Path
    setting: str  # the name of the config's key, for complaints

    def read(self) -> tuple[bytes, bytes]:
        """Key and certificates. Raises: ConfigError."""
        return read_file(self.key, self.setting), read_file(self.certificate, self.setting)


def require_usable(files: CertificateFiles) -> ssl.SSLContext:
    """A server's context. Raises: ConfigError for files that are missing, damaged, expired or not of one pair."""
    files.read()
    with _naming(files):
        server = _with_certificate(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), files)
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname = False
        client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # who signed it is its clients' business
        client.load_verify_locations(files.certificate)
        _shake_hands(server, client, None)
    return server


def require_usable_by_both(mutual: TlsFiles, name: str | None, setting: str) -> None:
    """Whether two processes with these files would accept each other. Raises: ConfigError.

    name: the one that the certificate must bear; None: not looked at here.
    """
    files = CertificateFiles(mutual.cert, mutual.key, setting)
    files.read()
    read_file(mutual.ca, setting)
    with _naming(files):
        server = _with_certificate(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), files)
        client = _with_certificate(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), files)
        client.check_hostname = name is not None
        server.verify_mode = ssl.CERT_REQUIRED
        for context in (server, client):
            _trust(context, mutual.ca, setting)
        _shake_hands(server, client, name)


def read_file(path: Path, setting: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{setting}: cannot read {path}: {error.strerror}") from error


def _with_certificate(context: ssl.SSLContext, files: CertificateFiles) -> ssl.SSLContext:
    # a key with a password fails instead of asking the terminal for it
    context.load_cert_chain(files.certificate, files.key, password=lambda: "")
    return context


def _trust(context: ssl.SSLContext, authority: Path, setting: str) -> None:
    try:
        context.load_verify_locations(authority)
    except ssl.SSLError as error:
        raise ConfigError(f"{setting}: {authority} holds no certificate in PEM") from error


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, name: str | None) -> None:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    while ends:
        for end in list(ends):
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
                ends.remove(end)


@contextmanager
def _naming(files: CertificateFiles) -> Iterator[None]:
    """OpenSSL's words as a ConfigError with the names of the files."""
    try:
        yield
    except ssl.SSLCertVerificationError as error:
        message = f"{files.setting}: {files.certificate} cannot be used: {error.verify_message}"
        raise ConfigError(message) from error
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            problem = f"the key in {files.key} does not belong to the certificate in {files.certificate}"
        else:
            problem = f"{files.certificate} must be a certificate and {files.key} its key without a password, both PEM"
        raise ConfigError(f"{files.setting}: {problem}") from error
