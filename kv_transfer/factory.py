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
from kv_transfer.nixl_agent import require_nixl
from kv_transfer.nixl_channel import NixlDestination, NixlSource
from kv_transfer.receiver import LinkReceiver
from kv_transfer.sender import LinkSender
from kv_transfer.stream_channel import StreamSource
from kv_transfer.torch_dist import TorchDistDestination, TorchDistSource
from kv_transfer.transport import TransferStats
from kv_transfer.wire_dtype import WireDtype

MAX_MESSAGE_AIM = 256 * 1024  # gRPC moves larger messages no faster, and those of 1 MB at half the speed
TRANSPORTS = ("grpc", "torch_dist", "nixl", "loopback")


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
    stats = TransferStats()
    ways = [new_way(name, device, stats, network) for name in _chosen(config, device)]
    return LinkSender(_endpoint(config, layout, incarnation), ways, config, stats)


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
    stats = TransferStats()
    listeners = [_new_listener(name, device, stats, network) for name in chosen]
    return LinkReceiver(_endpoint(config, layout, incarnation), listeners, staging, config, stats)


def new_way(transport: str, device: torch.device, stats: TransferStats, network: LoopbackNetwork | None = None) -> Way:
    dial = partial(_dial, transport, device, stats, network)
    return Way(transport, dial, MAX_MESSAGE_AIM if transport == "grpc" else None)


def _dial(
    transport: str, device: torch.device, stats: TransferStats, network: LoopbackNetwork | None, address: str
) -> SourceChannel:
    match transport:
        case "grpc":
            return StreamSource(transport, GrpcLinkStream(transport, address), InlineSource())
        case "torch_dist":
            return StreamSource(transport, GrpcLinkStream(transport, address), TorchDistSource(device))
        case "nixl":
            host = address.rpartition(":")[0]
            return StreamSource(transport, GrpcLinkStream(transport, address), NixlSource(host, stats))
    assert network is not None, "loopback ends meet in a LoopbackNetwork"
    return StreamSource(transport, network.dial(address), InlineSource())


def _new_listener(
    transport: str, device: torch.device, stats: TransferStats, network: LoopbackNetwork | None
) -> Listener:
    match transport:
        case "grpc":
            return GrpcListener(transport, lambda host: InlineDestination())
        case "torch_dist":
            return GrpcListener(transport, partial(TorchDistDestination, device))
        case "nixl":
            return GrpcListener(transport, partial(NixlDestination, stats))
    assert network is not None, "loopback ends meet in a LoopbackNetwork"
    return LoopbackListener(network)


def _chosen(config: TransferConfig, device: torch.device) -> list[str]:
    if config.transport == "auto":
        return ["torch_dist"] if device.type == "cuda" else ["grpc"]
    if config.transport == "nixl":
        require_nixl()
    if config.transport not in TRANSPORTS:
        raise ConfigError(f"transfer.transport is {config.transport!r}; it must be auto or one of {TRANSPORTS}")
    return [config.transport]


def _endpoint(config: TransferConfig, layout: KVLayout, incarnation: str) -> Endpoint:
    heads = HeadRange(0, layout.num_kv_heads)
    return Endpoint(layout, incarnation, heads, config.secret, WireDtype(config.wire_dtype))
