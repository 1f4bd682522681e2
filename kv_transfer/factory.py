"""Makes the two ends of a transport by name.

    # decode worker
    receiver = make_receiver("grpc", layout, incarnation, device)
    receiver.add_to_server(server)  # its own grpc.aio server, before it starts
    receiver.serve_at(bind_port(server, host, port))  # the address that receiver.destination names
    await server.start()
    with closing(receiver.expect(transfer_id, num_tokens, skip_tokens, on_piece)) as reception:
        committed = await reception.committed()
    await receiver.close()

    # prefill worker
    sender = make_sender("grpc", layout, incarnation, device)
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
from kv_transfer.grpc_stream import GrpcLinkStream
from kv_transfer.inline import InlineDestination, InlineSource
from kv_transfer.link import Dial, Endpoint
from kv_transfer.loopback import LoopbackNetwork
from kv_transfer.receiver import LinkReceiver
from kv_transfer.sender import LinkSender
from kv_transfer.torch_dist import TorchDistDestination, TorchDistSource, channel_for


def make_sender(
    transport: str,
    layout: KVLayout,
    incarnation: str,
    device: torch.device,
    network: LoopbackNetwork | None = None,
) -> LinkSender:
    """The source's end; `send` takes tensors on `device`. Only "loopback" needs a network.

    Raises: ConfigError for an unknown transport.
    """
    endpoint = _endpoint(transport, layout, incarnation, device)
    new_payloads = partial(TorchDistSource, device) if transport == "torch_dist" else InlineSource
    return LinkSender(endpoint, _dial(transport, network), new_payloads)


def make_receiver(transport: str, layout: KVLayout, incarnation: str, device: torch.device) -> LinkReceiver:
    """The destination's end. Pieces arrive on `device` over "torch_dist" and on the CPU over the others.

    Raises: ConfigError for an unknown transport.
    """
    endpoint = _endpoint(transport, layout, incarnation, device)
    new_payloads = partial(TorchDistDestination, device, layout) if transport == "torch_dist" else InlineDestination
    return LinkReceiver(endpoint, new_payloads)


def _endpoint(transport: str, layout: KVLayout, incarnation: str, device: torch.device) -> Endpoint:
    match transport:
        case "grpc" | "loopback":
            return Endpoint(transport, "inline", layout, incarnation)
        case "torch_dist":
            return Endpoint(transport, channel_for(device), layout, incarnation)
    raise ConfigError(f"transfer.transport is {transport!r}; it must be one of grpc, torch_dist, loopback")


def _dial(transport: str, network: LoopbackNetwork | None) -> Dial:
    if transport != "loopback":
        return GrpcLinkStream
    assert network is not None, "loopback ends meet in a LoopbackNetwork"
    return network.dial
