"""A certificate authority for one test, and the certificates that it signs."""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from common.transfer_config import TlsFiles

VALID_FOR = timedelta(days=1)
LOOPBACK = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
NAMES = [x509.DNSName("pdserve"), x509.DNSName("localhost"), LOOPBACK]


class Authority:
    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = _name(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._file = folder / f"{name}.pem"
        self._file.write_bytes(_pem(self._signed(self._name, self._key.public_key(), is_authority=True)))

    def certify(self, worker: str, until: datetime | None = None) -> TlsFiles:
        """For any component on this machine. until: tomorrow, unless given."""
        key = ec.generate_private_key(ec.SECP256R1())
        files = TlsFiles(self._folder / f"{worker}.crt", self._folder / f"{worker}.key", self._file)
        files.cert.write_bytes(_pem(self._signed(_name(worker), key.public_key(), is_authority=False, until=until)))
        files.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return files

    def lock(self, key: Path) -> None:
        """With a password."""
        loaded = serialization.load_pem_private_key(key.read_bytes(), password=None)
        locked = serialization.BestAvailableEncryption(b"password")
        key.write_bytes(loaded.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked))

    def _signed(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, is_authority: bool, until: datetime | None = None
    ) -> x509.Certificate:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 30 * VALID_FOR)
            .not_valid_after(until or now + VALID_FOR)
            .add_extension(x509.SubjectAlternativeName(NAMES), critical=False)
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
