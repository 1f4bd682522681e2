"""Composes a prefill worker: engine, KV sender, gRPC server, membership. Stops them in reverse."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import torch

from common.config import Role, ServeConfig
from common.drain import Drain
from common.identity import new_incarnation
from common.kv_layout import KVLayout
from common.metrics_server import MetricsServer
from common.model_source import resolve_model
from common.pb import serving_pb2_grpc as pb_grpc
from common.tracing import make_tracer
from common.transfer_config import TransferConfig
from common.worker_server import LoadReports, StatusSource, WorkerIdentity, WorkerServer
from engine.async_engine import AsyncEngine
from engine.build import build_engine
from kv_transfer.factory import make_sender
from kv_transfer.transport import KVSender
from prefill_worker.kv_push import KVPush
from prefill_worker.service import PrefillService
from prefill_worker.worker import PrefillWorker

SenderFactory = Callable[[TransferConfig, KVLayout, str, torch.device], KVSender]


class PrefillServer:
    """A running prefill worker. Make one with `start`."""

    def __init__(self, address: str, server: WorkerServer, drain: Drain, engine: AsyncEngine, sender: KVSender) -> None:
        self.address = address
        self._server = server
        self._drain = drain
        self._engine = engine
        self._sender = sender

    @staticmethod
    async def start(
        config: ServeConfig, name: str, routers: list[str], new_sender: SenderFactory = make_sender
    ) -> PrefillServer:
        """Load the model, then serve and register. Raises: ConfigError, ModelError."""
        transfer_config = config.kv_transfer()  # a mistake in it is told before the model is loaded
        tracer = make_tracer(config.telemetry, "pdserve-prefill", name)
        access = config.security.cluster_access()
        pool = config.pool(Role.PREFILL)
        metrics = MetricsServer(pool.host, pool.metrics_port, "prefill.metrics_port")
        path = await asyncio.to_thread(resolve_model, config.model.source)
        loaded = await asyncio.to_thread(build_engine, config.engine(Role.PREFILL, path))
        await asyncio.to_thread(loaded.warm_up)
        push = KVPush(loaded)
        engine = AsyncEngine(loaded, tap=push)
        incarnation = new_incarnation()
        sender = new_sender(transfer_config, engine.layout, incarnation, engine.device)
        sender.on_room = engine.wake
        worker = PrefillWorker(engine, push, sender, config.transfer.timeout_s)

        drain = Drain(name, pool.drain_timeout_s)
        loads = LoadReports(engine, sender, drain)

        def counters() -> dict[str, int]:
            return {"prefills": worker.num_prefills, **sender.stats.as_counters(), **engine.counters()}

        def add_prefill(grpc_server: grpc.aio.Server) -> None:
            pb_grpc.add_PrefillServicer_to_server(PrefillService(worker, drain, status, tracer), grpc_server)

        server = WorkerServer({"pdserve.v1.Prefill": add_prefill}, drain, access, tracer)
        address = server.bind(pool.host)
        hello = loads.hello(config, Role.PREFILL, WorkerIdentity(name, incarnation, address, metrics.address))
        status = StatusSource(hello, loads.measure, counters, sender)
        await server.serve_metrics(metrics, status)
        await server.start(hello, routers, loads)
        return PrefillServer(address, server, drain, engine, sender)

    def begin_drain(self) -> None:
        self._drain.begin()

    async def wait_drained(self) -> None:
        await self._drain.ended()

    async def wait_crashed(self) -> BaseException:
        return await self._engine.wait_crashed()

    async def stop(self) -> None:
        await self._server.stop()
        await self._sender.close()
        await self._engine.stop()
