"""Composes a decode worker: engine, KV receiver, gRPC server, membership. Stops them in reverse."""

from __future__ import annotations

import asyncio

import grpc

from common.config import Role, ServeConfig
from common.drain import Drain
from common.identity import new_incarnation
from common.metrics_server import MetricsServer
from common.model_source import resolve_model
from common.pb import serving_pb2_grpc as pb_grpc
from common.tracing import make_tracer
from common.worker_server import LoadReports, StatusSource, WorkerIdentity, WorkerServer
from decode_worker.intake import KVIntake
from decode_worker.pair_check import PairCheck, PromptCapture
from decode_worker.service import DecodeService
from decode_worker.worker import DecodeWorker
from engine.async_engine import AsyncEngine
from engine.build import build_engine
from kv_transfer.factory import make_receiver
from kv_transfer.transport import KVReceiver
from kv_transfer.wire_dtype import WireDtype


class DecodeServer:
    """A running decode worker. Make one with `start`; colocated is the same worker with another role."""

    def __init__(
        self, address: str, server: WorkerServer, drain: Drain, engine: AsyncEngine, receiver: KVReceiver
    ) -> None:
        self.address = address
        self._server = server
        self._drain = drain
        self._engine = engine
        self._receiver = receiver

    @staticmethod
    async def start(config: ServeConfig, name: str, routers: list[str], role: Role = Role.DECODE) -> DecodeServer:
        """Load the model, then serve and register. Raises: ConfigError, ModelError."""
        transfer_config = config.kv_transfer()  # a mistake in it is told before the model is loaded
        tracer = make_tracer(config.telemetry, f"pdserve-{role}", name)
        access = config.security.cluster_access()
        pool = config.pool(role)
        metrics = MetricsServer(pool.host, pool.metrics_port, f"{role}.metrics_port")
        path = await asyncio.to_thread(resolve_model, config.model.source)
        loaded = await asyncio.to_thread(build_engine, config.engine(role, path))
        await asyncio.to_thread(loaded.warm_up)
        capture = PromptCapture(loaded)
        engine = AsyncEngine(loaded, tap=capture)
        incarnation = new_incarnation()
        receiver = make_receiver(transfer_config, engine.layout, incarnation, engine.device)
        intake = KVIntake(engine, receiver)
        worker = DecodeWorker(engine, intake)
        pair_check = PairCheck(engine, intake, capture, WireDtype(config.transfer.wire_dtype))

        drain = Drain(name, pool.drain_timeout_s)
        loads = LoadReports(engine, receiver, drain)

        def counters() -> dict[str, int]:
            return {
                "local_prefills": worker.num_local_prefills,
                "received_prefills": worker.num_received_prefills,
                **receiver.stats.as_counters(),
                **engine.counters(),
            }

        def add_decode(grpc_server: grpc.aio.Server) -> None:
            service = DecodeService(worker, pair_check, drain, status, tracer)
            pb_grpc.add_DecodeServicer_to_server(service, grpc_server)

        services = {"pdserve.v1.Decode": add_decode, "pdserve.v1.KVTransfer": receiver.add_to_server}
        server = WorkerServer(services, drain, access, tracer)
        address = server.bind(pool.host)
        await receiver.open(address)
        hello = loads.hello(config, role, WorkerIdentity(name, incarnation, address, metrics.address))
        status = StatusSource(hello, loads.measure, counters, receiver)
        await server.serve_metrics(metrics, status)
        await server.start(hello, routers, loads)
        return DecodeServer(address, server, drain, engine, receiver)

    def begin_drain(self) -> None:
        self._drain.begin()

    async def wait_drained(self) -> None:
        await self._drain.ended()

    async def wait_crashed(self) -> BaseException:
        return await self._engine.wait_crashed()

    async def stop(self) -> None:
        await self._server.leave()
        await self._receiver.close()  # while its server still answers, so that sources hear of it
        await self._server.stop()
        await self._engine.stop()
