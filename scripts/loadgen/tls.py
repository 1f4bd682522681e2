"""Whom a client of the load test trusts."""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc


class ClientTls:
    """What --tls and --ca ask for."""

    def __init__(self, for_grpc: bool = False, authority: Path | None = None) -> None:
        """for_grpc: speak TLS to gRPC targets; an authority implies it. Raises: OSError (ssl.SSLError is one)."""
        self.https = ssl.create_default_context(cafile=authority)
        self.grpc: grpc.ChannelCredentials | None = None
        if for_grpc or authority is not None:
            self.grpc = grpc.ssl_channel_credentials(None if authority is None else authority.read_bytes())
