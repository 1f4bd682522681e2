"""A mistake in a certificate is told at start, with the file's name; a new one is taken while the server runs."""

from __future__ import annotations

import shutil
import ssl
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from common.config import ServeConfig
from common.errors import ConfigError
from common.security_config import SecuritySection
from common.server_certificate import ServerCertificate
from common.tls_files import CertificateFiles
from common.transfer_config import TlsFiles
from tests.kv_transfer.certificates import Authority

YESTERDAY = datetime.now(UTC) - timedelta(days=1)


def config_of(files: TlsFiles, **changed: object) -> SecuritySection:
    """With the same files for both kinds of TLS."""
    pair = {"certificate_file": files.cert, "key_file": files.key}
    return SecuritySection.model_validate({"tls": pair, "cluster_tls": {**pair, "ca_file": files.ca, **changed}})


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "authority")


@pytest.fixture
def files(authority: Authority) -> TlsFiles:
    return authority.certify("server")


def test_good_files_are_accepted(files: TlsFiles) -> None:
    config = config_of(files)
    assert config.certificate() is not None
    access = config.cluster_access()
    assert access.tls is not None
    assert access.tls.name == "pdserve"


def absent(authority: Authority, files: TlsFiles) -> str:
    files.key.unlink()
    return f"cannot read {files.key}: No such file"


def no_pem(authority: Authority, files: TlsFiles) -> str:
    files.cert.write_text("certainly")
    return f"{files.cert} must be a certificate and {files.key} its key without a password"


def of_another(authority: Authority, files: TlsFiles) -> str:
    shutil.copy(authority.certify("other").key, files.key)
    return f"the key in {files.key} does not belong to the certificate in {files.cert}"


def expired(authority: Authority, files: TlsFiles) -> str:
    authority.certify("server", until=YESTERDAY)
    return f"{files.cert} cannot be used: certificate has expired"


def with_password(authority: Authority, files: TlsFiles) -> str:
    authority.lock(files.key)
    return f"{files.key} its key without a password"


MISTAKES = [absent, no_pem, of_another, expired, with_password]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_by_key_and_file(
    authority: Authority, files: TlsFiles, mistake: Callable[[Authority, TlsFiles], str]
) -> None:
    words = mistake(authority, files)
    config = config_of(files)
    for setting, read in (("security.tls", config.certificate), ("security.cluster_tls", config.cluster_access)):
        with pytest.raises(ConfigError) as caught:
            read()
        assert str(caught.value).startswith(f"{setting}: ")
        assert words in str(caught.value)


def test_a_certificate_of_another_authority_is_refused_between_components(tmp_path: Path, files: TlsFiles) -> None:
    other = Authority(tmp_path, "other").certify("other")
    with pytest.raises(ConfigError, match=r"server\.crt cannot be used: unable to get local issuer certificate"):
        config_of(TlsFiles(files.cert, files.key, other.ca)).cluster_access()


def test_a_certificate_without_the_common_name_is_refused_between_components(files: TlsFiles) -> None:
    with pytest.raises(ConfigError, match="Hostname mismatch, certificate is not valid for 'elsewhere'"):
        config_of(files, name="elsewhere").cluster_access()


def test_the_clusters_certificates_serve_for_kv_over_tcp_unless_it_has_its_own(files: TlsFiles, tmp_path: Path) -> None:
    its_own = Authority(tmp_path, "of-kv").certify("kv")
    own = {"cert": its_own.cert, "key": its_own.key, "ca": its_own.ca}
    for transfer, expected in (
        ({}, files),
        ({"transport": "tcp"}, files),
        ({"tls": own}, its_own),
        ({"transport": "grpc"}, None),  # which is the cluster's own gRPC
        ({"transport": "torch_dist"}, None),  # asked for by name: a trusted fabric
    ):
        config = ServeConfig.model_validate({"transfer": transfer, "security": config_of(files).model_dump()})
        assert config.kv_transfer().tls == expected
        assert config.kv_transfer().cluster_tls == config.security.cluster_access().tls


@pytest.mark.parametrize("missing", ["cert", "key", "ca"])
def test_a_missing_file_of_kv_transfer_is_named_by_the_config(files: TlsFiles, tmp_path: Path, missing: str) -> None:
    own = {"cert": files.cert, "key": files.key, "ca": files.ca, missing: tmp_path / "missing.pem"}
    config = ServeConfig.model_validate({"transfer": {"tls": own}})
    with pytest.raises(ConfigError, match=r"^transfer\.tls: cannot read .*missing\.pem: No such file"):
        config.kv_transfer()


# ---------------------------------------------------------------- while it runs


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 10.0  # each handshake long after the last
        return self.now_s


def served_serial(certificate: ServerCertificate, context: ssl.SSLContext, files: TlsFiles) -> str:
    """Of the certificate that a client is shown."""
    client = ssl.create_default_context(cafile=files.ca)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(to_client, to_server, server_hostname="localhost")]
    ends.append(context.wrap_bio(to_server, to_client, server_side=True))
    for _ in range(3):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    shown = ends[0].getpeercert()
    assert shown is not None
    return str(shown["serialNumber"])


def test_a_new_certificate_is_served_without_a_restart_and_a_wrong_one_never(
    authority: Authority, files: TlsFiles, caplog: pytest.LogCaptureFixture
) -> None:
    certificate = ServerCertificate(CertificateFiles(files.cert, files.key, "security.tls"), Clock())
    context = certificate.http_context()
    first = served_serial(certificate, context, files)
    assert served_serial(certificate, context, files) == first
    authority.certify("server")
    second = served_serial(certificate, context, files)
    assert second != first
    for mistake in (expired, no_pem, absent):
        caplog.clear()
        words = mistake(authority, files)
        for _ in range(3):
            assert served_serial(certificate, context, files) == second
        assert [words in record.message for record in caplog.records] == [True]
    authority.certify("server")
    assert served_serial(certificate, context, files) not in (first, second)
