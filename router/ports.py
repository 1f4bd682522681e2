"""The router's ports: two public ones on `router.host`, and on `router.control_host` what administers the cluster."""

from __future__ import annotations

import socket
from dataclasses import dataclass

import grpc

from common.cluster_access import ClusterAccess
from common.config import RouterSection
from common.errors import ConfigError
from common.rpc import bind_port
from common.server_certificate import ServerCertificate


@dataclass(frozen=True)
class Security:
    """How the ports are served."""

    certificate: ServerCertificate | None  # of the public ones; None: in the clear
    access: ClusterAccess  # to the control port


@dataclass(frozen=True)
class RouterPorts:
    http: socket.socket
    metrics: socket.socket | None  # of router/admin_pages.py; None: the HTTP port has them too
    http_url: str
    metrics_url: str
    grpc: str
    control: str


def take_ports(section: RouterSection, security: Security, public: grpc.aio.Server, control: str) -> RouterPorts:
    """control: the address that is bound already. All before serving on any.

    Raises: ConfigError naming the port that is taken.
    """
    http = _listen(section.host, section.http_port, "http_port", shares_port=section.processes > 1)
    certificate = security.certificate
    http_url = _url("http" if certificate is None else "https", http)
    metrics = _listen(section.control_host, section.metrics_port, "metrics_port") if section.has_metrics_port else None
    credentials = None if certificate is None else certificate.grpc_credentials()
    return RouterPorts(
        http,
        metrics,
        http_url,
        f"{http_url if metrics is None else _url('http', metrics)}/metrics",
        bind_port(public, section.host, section.grpc_port, credentials),
        control,
    )


def _listen(host: str, port: int, key: str, *, shares_port: bool = False) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only on sockets that say they are TCP; without it a token may wait 40 ms for an ACK
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shares_port:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; choose another router.{key}") from error
    return listening


def _url(scheme: str, listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
