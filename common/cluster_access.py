"""How pdserve's own processes know each other: every call proves the cluster's secret, over mutual TLS if configured.

    async with connect(address, access) as channel:     the caller: a proof is added to each call
    server = new_cluster_server(access)                 whom it calls: strangers are refused unread
    bind_cluster_port(server, host, port, access)

A proof tells a server who calls. It neither hides nor seals what is said, and tells the caller nothing about the
server: where others can read or change the traffic, or take over an address, mutual TLS is needed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import grpc

from common.proof import GuardInterceptor, ProofChecker, ProvingChannel
from common.rpc import bind_port, new_channel, new_server
from common.transfer_config import ClusterTls, TlsFiles


@dataclass(frozen=True)
class ClusterAccess:
    """Without a secret nobody proves anything; common/security_config.py then keeps everything on loopback."""

    secret: bytes = field(default=b"", repr=False)
    tls: ClusterTls | None = None


NO_SECRET = ClusterAccess()  # a process that demands proofs refuses whoever calls with this


def connect(address: str, access: ClusterAccess) -> grpc.aio.Channel:
    """To another process of this cluster."""
    channel = _channel(address, access.tls)
    return ProvingChannel(channel, access.secret) if access.secret else channel


def new_cluster_server(access: ClusterAccess) -> grpc.aio.Server:
    return new_server([GuardInterceptor(ProofChecker(access.secret))] if access.secret else [])


def bind_cluster_port(server: grpc.aio.Server, host: str, port: int, access: ClusterAccess) -> str:
    """As bind_port. Raises: ConfigError."""
    return bind_port(server, host, port, None if access.tls is None else _server_credentials(access.tls.files))


def _channel(address: str, tls: ClusterTls | None) -> grpc.aio.Channel:
    if tls is None:
        return new_channel(address)
    key, chain, authority = _read(tls.files)
    credentials = grpc.ssl_channel_credentials(authority, key, chain)
    return new_channel(address, credentials, tls.name)


def _server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    key, chain, authority = _read(files)
    return grpc.ssl_server_credentials([(key, chain)], authority, require_client_auth=True)


def _read(files: TlsFiles) -> tuple[bytes, bytes, bytes]:
    return files.key.read_bytes(), files.cert.read_bytes(), files.ca.read_bytes()
