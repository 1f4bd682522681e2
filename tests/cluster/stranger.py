"""A prefill worker that knows everything about a decode worker, and a secret of its own."""

from __future__ import annotations

from pathlib import Path

import torch

from cluster.registry_client import cluster_status
from common.cluster_access import ClusterAccess
from common.config import load_config
from common.identity import Ticket, new_incarnation, new_transfer_id
from common.kv_layout import KVLayout
from common.pb import serving_pb2 as pb
from common.transfer_config import TransferConfig
from kv_transfer.factory import make_sender
from kv_transfer.transport import Destination, Offer
from kv_transfer.wire import PROTOCOL_VERSION


async def decode_worker_of(control_address: str, secret: bytes) -> pb.WorkerHello:
    status = await cluster_status(control_address, ClusterAccess(secret), timeout_s=10)
    [decode] = [worker.hello for worker in status.workers if worker.hello.role == pb.ROLE_DECODE]
    return decode


async def connect(decode: pb.WorkerHello, secret: bytes) -> None:
    """Make a link and begin a transfer on it. Raises: IncompatiblePeer for a wrong secret."""
    own = new_incarnation()
    config = TransferConfig(transport="grpc", secret=secret)
    sender = make_sender(config, KVLayout.from_pb(decode.layout), own, torch.device("cpu"))
    destination = Destination(decode.incarnation, (Offer("grpc", decode.address),), PROTOCOL_VERSION)
    try:
        await sender.open(destination, Ticket(new_transfer_id(), 1, own, decode.incarnation, num_tokens=1))
    finally:
        await sender.close()


def control_address(logs: Path) -> str:
    """Of the run whose members read the config in this folder."""
    return f"127.0.0.1:{load_config(logs / 'serve.yaml').router.control_port}"
