"""serve.yaml's section `security`: the cluster's secret and the certificates."""

from __future__ import annotations

import ipaddress
from pathlib import Path

from common.cluster_access import ClusterAccess
from common.config_section import Section
from common.errors import ConfigError
from common.server_certificate import ServerCertificate
from common.tls_files import CertificateFiles, require_usable_by_both
from common.transfer_config import ClusterTls, TlsFiles

MIN_SECRET_BYTES = 16


class TlsSection(Section):
    """Of the public APIs. PEM files."""

    certificate_file: Path  # and below it in the file whatever leads to its authority
    key_file: Path


class ClusterTlsSection(Section):
    """Between the cluster's own processes, each of which shows a certificate of the cluster's authority. PEM files."""

    certificate_file: Path
    key_file: Path
    ca_file: Path
    name: str | None = "pdserve"  # a DNS name in every certificate; null: each bears the address that it is called by


class SecuritySection(Section):
    # what workers and routers prove to each other that they know; `pdserve up` makes one for each run that has none
    secret_file: Path | None = None
    tls: TlsSection | None = None  # of both public APIs
    cluster_tls: ClusterTlsSection | None = None  # of everything else

    def secret(self) -> bytes:
        """Empty when none is configured. Raises: ConfigError when it cannot be read or is too short to be one."""
        path = self.secret_file
        if path is None:
            return b""
        try:
            secret = path.read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"security.secret_file: cannot read {path}: {error.strerror}") from error
        if len(secret) < MIN_SECRET_BYTES:
            raise ConfigError(
                f"security.secret_file: {path} holds {len(secret)} bytes; a secret needs {MIN_SECRET_BYTES}, "
                "for example from `openssl rand -hex 32`"
            )
        return secret

    def cluster_access(self) -> ClusterAccess:
        """Raises: ConfigError when the secret or a certificate cannot be used."""
        return ClusterAccess(self.secret(), self._cluster_tls())

    def certificate(self) -> ServerCertificate | None:
        """None: the public APIs speak in the clear. Raises: ConfigError when it cannot be used."""
        if self.tls is None:
            return None
        return ServerCertificate(CertificateFiles(self.tls.certificate_file, self.tls.key_file, "security.tls"))

    def _cluster_tls(self) -> ClusterTls | None:
        section = self.cluster_tls
        if section is None:
            return None
        files = TlsFiles(section.certificate_file, section.key_file, section.ca_file)
        require_usable_by_both(files, section.name, "security.cluster_tls")
        return ClusterTls(files, section.name)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name
        return host == "localhost"
