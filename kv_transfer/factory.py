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
from functools import partial

import torch

from common.errors import ConfigError
from common.kv_layout import KVLayout
from common.transfer_config import TransferConfig
from kv_transfer.grpc_stream import GrpcLinkStream, GrpcListener
from kv_transfer.heads import HeadRange
from kv_transfer.inline import InlineDestination, InlineSource
from kv_transfer.link import Endpoint, Listener, SourceChannel, Way
from kv_transfer.loopback import LoopbackListener, LoopbackNetwork
from kv_transfer.receiver import LinkReceiver
from kv_transfer.sender import LinkSender
from kv_transfer.socket_listener import SocketListener
from kv_transfer.socket_medium import Medium
from kv_transfer.socket_source import SocketSource
from kv_transfer.stream_channel import StreamSource
from kv_transfer.tcp import Tcp, tls_contexts
from kv_transfer.torch_dist import TorchDistDestination, TorchDistSource
from kv_transfer.wire_dtype import WireDtype

DEFAULT_CONFIG = TransferConfig()
TRANSPORTS = ("shm", "tcp", "grpc", "torch_dist", "loopback")


def make_sender(
    config: TransferConfig,
    layout: KVLayout,
    incarnation: str,
    device: torch.device,
    network: LoopbackNetwork | None = None,
) -> LinkSender:
    """The source's end; `send` takes tensors on `device`. Only "loopback" needs a network.

    Raises: ConfigError for an unknown transport.
    """
    endpoint = _endpoint(config, layout, incarnation)
    ways = [new_way(name, device, network, config) for name in _chosen(config, device)]
    return LinkSender(endpoint, ways, config)


def make_receiver(
    config: TransferConfig,
    layout: KVLayout,
    incarnation: str,
    device: torch.device,
    network: LoopbackNetwork | None = None,
) -> LinkReceiver:
    """The destination's end. Pieces are staged on `device` over "torch_dist" alone, else in host memory.

    Raises: ConfigError for an unknown transport.
    """
    chosen = _chosen(config, device)
    staging = device if chosen == ["torch_dist"] else torch.device("cpu")
    listeners = [_new_listener(name, device, network, config) for name in chosen]
    return LinkReceiver(_endpoint(config, layout, incarnation), listeners, staging, config)


def new_way(
    transport: str,
    device: torch.device,
    network: LoopbackNetwork | None = None,
    config: TransferConfig = DEFAULT_CONFIG,
) -> Way:
    return Way(transport, _dial(transport, device, network, config))


def _dial(
    transport: str, device: torch.device, network: LoopbackNetwork | None, config: TransferConfig
) -> Callable[[str], SourceChannel]:
    match transport:
        case "grpc":
            return lambda address: StreamSource(transport, GrpcLinkStream(transport, address), InlineSource())
        case "torch_dist":
            return lambda address: StreamSource(transport, GrpcLinkStream(transport, address), TorchDistSource(device))
        case "tcp":
            return partial(SocketSource, _new_tcp(config))
        case "shm":
            return partial(SocketSource, _new_shm())
    assert network is not None, "loopback ends meet in a LoopbackNetwork"
    return lambda address: StreamSource(transport, network.dial(address), InlineSource())


def _new_listener(
    transport: str, device: torch.device, network: LoopbackNetwork | None, config: TransferConfig
) -> Listener:
    match transport:
        case "grpc":
            return GrpcListener(transport, lambda host: InlineDestination())
        case "torch_dist":
            return GrpcListener(transport, partial(TorchDistDestination, device))
        case "tcp":
            return SocketListener(_new_tcp(config), config.connect_timeout_s)
        case "shm":
            return SocketListener(_new_shm(), config.connect_timeout_s)
    assert network is not None, "loopback ends meet in a LoopbackNetwork"
    return LoopbackListener(network)


def _new_tcp(config: TransferConfig) -> Tcp:
    tls = None if config.tls is None else tls_contexts(config.tls)
    return Tcp(config.tcp_port, config.tcp_connections, tls, config.connect_timeout_s)


def _new_shm() -> Medium:
    if sys.platform != "linux":
        raise ConfigError("transfer.transport shm needs Linux")
    from kv_transfer.shm import Shm

    return Shm()


def _chosen(config: TransferConfig, device: torch.device) -> list[str]:
    if config.transport == "auto":
        return ["torch_dist"] if device.type == "cuda" else ["grpc"]
    if config.transport not in TRANSPORTS:
        raise ConfigError(f"transfer.transport is {config.transport!r}; it must be auto or one of {TRANSPORTS}")
    return [config.transport]


def _endpoint(config: TransferConfig, layout: KVLayout, incarnation: str) -> Endpoint:
    heads = HeadRange(0, layout.num_kv_heads)
    return Endpoint(layout, incarnation, heads, config.secret, WireDtype(config.wire_dtype))
