"""What KV transfer is told at start. Plain dataclasses: it runs where pydantic is not installed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

MIB = 1024 * 1024


@dataclass(frozen=True)
class TlsFiles:
    """PEM files of one worker."""

    cert: Path
    key: Path
    ca: Path  # the cluster's own authority, which certifies every worker


@dataclass(frozen=True)
class ClusterTls:
    """Between any two of the cluster's processes, over gRPC."""

    files: TlsFiles
    name: str | None = None  # that the other side's certificate must bear; None: the address that is called


@dataclass(frozen=True)
class TransferConfig:
    transport: str = "auto"  # "auto" or one of kv_transfer/factory.py's
    piece_bytes: int | None = None  # aim; None: by the link's speed
    window_bytes: int = 64 * MIB  # staging memory for each source, on the destination
    max_links: int = 64  # sources at one destination
    connect_timeout_s: float = 10.0  # dial, handshake and measurement
    stall_timeout_s: float = 30.0  # a destination that makes no room for so long is lost
    wire_dtype: str = "same"  # "same", "int8", "fp8": how KV is written on the wire
    tcp_port: int = 0  # that a destination listens on; 0: any free one
    tcp_connections: int = 1  # for the payloads of one link
    tls: TlsFiles | None = None  # over "tcp"
    cluster_tls: ClusterTls | None = None  # over "grpc", and for the messages of "torch_dist" and "nixl"
    secret: bytes = field(default=b"", repr=False)  # the cluster's; empty: anybody who reaches the port may connect
