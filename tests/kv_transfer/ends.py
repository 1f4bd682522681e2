"""Any number of sources and destinations of one kind, each with an Endpoint and a config of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from common.rpc import bind_port, new_server
from common.transfer_config import TransferConfig
from kv_transfer.factory import Surroundings, new_way
from kv_transfer.grpc_stream import GrpcListener
from kv_transfer.inline import InlineDestination
from kv_transfer.link import Endpoint, Listener, Way
from kv_transfer.loopback import LoopbackListener, LoopbackNetwork
from kv_transfer.receiver import LinkReceiver
from kv_transfer.sender import LinkSender
from kv_transfer.shm import Shm
from kv_transfer.socket_listener import SocketListener
from kv_transfer.tcp import Tcp
from tests.kv_transfer.wires import CPU, TIMEOUT_S

HOST_KINDS = ["loopback", "grpc", "tcp", "shm"]


class Ends:
    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.network = LoopbackNetwork()
        self.config = TransferConfig(transport=kind)
        self._senders: list[LinkSender] = []
        self._receivers: list[LinkReceiver] = []
        self._servers: list[grpc.aio.Server] = []

    @property
    def way(self) -> Way:
        return new_way(self.kind, Surroundings(CPU, network=self.network))

    def sender(self, endpoint: Endpoint, config: TransferConfig | None = None) -> LinkSender:
        sender = LinkSender(endpoint, [self.way], config or self.config)
        self._senders.append(sender)
        return sender

    async def receiver(self, endpoint: Endpoint, config: TransferConfig | None = None) -> LinkReceiver:
        receiver = LinkReceiver(endpoint, [self._new_listener()], lambda transport: CPU, config or self.config)
        self._receivers.append(receiver)
        if self.kind != "grpc":
            await receiver.open("127.0.0.1:0")
            return receiver
        server = new_server()
        self._servers.append(server)
        receiver.add_to_server(server)
        await receiver.open(bind_port(server, "127.0.0.1", 0))
        await server.start()
        return receiver

    async def close(self) -> None:
        for sender in self._senders:
            await sender.close()
        for receiver in self._receivers:
            await receiver.close()
        for server in self._servers:
            await server.stop(grace=None)

    def _new_listener(self) -> Listener:
        match self.kind:
            case "grpc":
                return GrpcListener("grpc", lambda host: InlineDestination())
            case "tcp":
                return SocketListener(Tcp(), TIMEOUT_S)
            case "shm":
                return SocketListener(Shm(), TIMEOUT_S)
        return LoopbackListener(self.network)


@asynccontextmanager
async def ends_of(kind: str) -> AsyncIterator[Ends]:
    ends = Ends(kind)
    try:
        yield ends
    finally:
        await ends.close()
