"""Makes the two ends of KV transfer from the config.

    # decode worker
    receiver = make_receiver(config, layout, incarnation, device, host)
    receiver.add_to_server(server)  # its own grpc.aio server, before it starts
    await receiver.open(worker_address)  # once that is bound: the addresses that receiver.destination names
    with closing(receiver.expect(transfer_id, num_tokens, skip_tokens, on_piece)) as reception:
        committed = await reception.committed()
    await receiver.close()

    # prefill worker
    sender = make_sender(config, layout, incarnation, device)
    transfer = await sender.open(destination, ticket)
    transfer.send(piece)  # from any thread; pieces in any order
    receipt = await transfer.commit(first_token, timeout_s)
    await sender.close()

Both are made and closed on the event loop that uses them; close the receiver before stopping its server.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from common.cluster_access import ClusterAccess
from common.errors import ConfigError
from common.kv_layout import KVLayout
from common.transfer_config import TransferConfig
from kv_transfer.grpc_stream import GrpcLinkStream, GrpcListener
from kv_transfer.heads import HeadRange
from kv_transfer.inline import InlineDestination, InlineSource
from kv_transfer.link import Endpoint, Listener, SourceChannel, Way
from kv_transfer.loopback import LoopbackListener, LoopbackNetwork
from kv_transfer.nixl_agent import require_nixl
from kv_transfer.nixl_channel import NixlDestination, NixlSource
from kv_transfer.receiver import LinkReceiver
from kv_transfer.sender import LinkSender
from kv_transfer.socket_listener import SocketListener
from kv_transfer.socket_medium import Medium
from kv_transfer.socket_source import SocketSource
from kv_transfer.stream_channel import PayloadSource, StreamSource
from kv_transfer.tcp import Tcp, tls_contexts
from kv_transfer.torch_dist import TorchDistDestination, TorchDistSource
from kv_transfer.transport import TransferStats
from kv_transfer.wire_dtype import WireDtype

MAX_MESSAGE_AIM = 256 * 1024  # gRPC moves larger messages no faster, and those of 1 MB at half the speed
TRANSPORTS = ("shm", "tcp", "grpc", "torch_dist", "nixl", "loopback")


@dataclass(frozen=True)
class Surroundings:
    """What the ends of any transport are made from."""

    device: torch.device  # where the KV cache is
    config: TransferConfig = field(default_factory=TransferConfig)
    stats: TransferStats = field(default_factory=TransferStats)
    network: LoopbackNetwork | None = None  # only "loopback" needs one


def make_sender(
    config: TransferConfig,
    layout: KVLayout,
    incarnation: str,
    device: torch.device,
    network: LoopbackNetwork | None = None,
) -> LinkSender:
    """The source's end; `send` takes tensors on `device`.

    Raises: ConfigError for a transport that is unknown or not to be had here.
    """
    here = Surroundings(device, config, network=network)
    ways = [new_way(name, here) for name in _chosen(config, device)]
    return LinkSender(_endpoint(config, layout, incarnation), ways, config, here.stats)


def make_receiver(
    config: TransferConfig,
    layout: KVLayout,
    incarnation: str,
    device: torch.device,
    network: LoopbackNetwork | None = None,
) -> LinkReceiver:
    """The destination's end. Pieces are staged on `device` over "torch_dist" alone, else in host memory.

    Raises: ConfigError for a transport that is unknown or not to be had here.
    """
    here = Surroundings(device, config, network=network)
    listeners = [_new_listener(name, here) for name in _chosen(config, device)]

    def staging_device(transport: str) -> torch.device:
        return device if transport == "torch_dist" else torch.device("cpu")

    return LinkReceiver(_endpoint(config, layout, incarnation), listeners, staging_device, config, here.stats)


def new_way(transport: str, here: Surroundings) -> Way:
    dial = _dial(transport, here)
    match transport:
        case "grpc":
            return Way(transport, dial, max_piece_bytes=MAX_MESSAGE_AIM)
        case "torch_dist":  # a header over gRPC and two threads at either end; round trips see the header alone
            return Way(transport, dial, piece_round_trips=1.5)
    return Way(transport, dial)


def _dial(transport: str, here: Surroundings) -> Callable[[str], SourceChannel]:
    match transport:
        case "tcp":
            return partial(SocketSource, _new_tcp(here.config), here.config.stall_timeout_s)
        case "shm":
            return partial(SocketSource, _new_shm(), here.config.stall_timeout_s)
        case "loopback":
            network = here.network
            assert network is not None, "loopback ends meet in a LoopbackNetwork"
            return lambda address: StreamSource(transport, network.dial(address), InlineSource())

    def dial(address: str) -> SourceChannel:
        access = ClusterAccess(here.config.secret, here.config.cluster_tls)
        stream = GrpcLinkStream(transport, address, access)
        return StreamSource(transport, stream, _new_payloads(transport, here, address))

    return dial


def _new_payloads(transport: str, here: Surroundings, address: str) -> PayloadSource:
    host = address.rpartition(":")[0]
    match transport:
        case "torch_dist":
            return TorchDistSource(here.device, host)
        case "nixl":
            return NixlSource(host, here.stats)
    return InlineSource()


def _new_listener(transport: str, here: Surroundings) -> Listener:
    match transport:
        case "tcp":
            return SocketListener(_new_tcp(here.config), here.config.connect_timeout_s)
        case "shm":
            return SocketListener(_new_shm(), here.config.connect_timeout_s)
        case "torch_dist":
            return GrpcListener(transport, partial(TorchDistDestination, here.device))
        case "nixl":
            return GrpcListener(transport, partial(NixlDestination, here.stats))
        case "loopback":
            assert here.network is not None, "loopback ends meet in a LoopbackNetwork"
            return LoopbackListener(here.network)
    return GrpcListener(transport, lambda host: InlineDestination())


def _new_tcp(config: TransferConfig) -> Tcp:
    tls = None if config.tls is None else tls_contexts(config.tls)
    return Tcp(config.tcp_port, config.tcp_connections, tls, config.connect_timeout_s)


def _new_shm() -> Medium:
    if sys.platform != "linux":
        raise ConfigError("transfer.transport shm needs Linux")
    from kv_transfer.shm import Shm

    return Shm()


def _chosen(config: TransferConfig, device: torch.device) -> list[str]:
    """Fastest first. With TLS, nothing that would cross a network in the clear."""
    if config.transport == "auto":
        own_host = ["shm"] if sys.platform == "linux" and device.type == "cpu" else []
        if config.tls is not None:
            return [*own_host, "tcp"]
        return ["torch_dist", "tcp", "grpc"] if device.type == "cuda" else [*own_host, "tcp", "grpc"]
    if config.transport not in TRANSPORTS:
        raise ConfigError(f"transfer.transport is {config.transport!r}; it must be auto or one of {TRANSPORTS}")
    if config.transport == "nixl":
        require_nixl()
    if config.tls is not None and config.transport in ("grpc", "torch_dist", "nixl"):
        raise ConfigError(f"transfer.tls does not cover {config.transport}; use tcp, shm or auto")
    return [config.transport]


def _endpoint(config: TransferConfig, layout: KVLayout, incarnation: str) -> Endpoint:
    heads = HeadRange(0, layout.num_kv_heads)
    return Endpoint(layout, incarnation, heads, config.secret, WireDtype(config.wire_dtype))
