"""Composes the router: registry and status on the control port, the OpenAI API over HTTP, Inference over gRPC."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import Coroutine
from typing import Any

import grpc

from common.cluster_access import bind_cluster_port, new_cluster_server
from common.config import RouterSection, ServeConfig
from common.model_source import resolve_model
from common.pb import serving_pb2 as pb
from common.pb import serving_pb2_grpc as pb_grpc
from common.process import allow_many_connections
from common.standard_services import add_standard_services
from common.tracing import make_tracer
from router.admin_pages import AdminPages, create_admin_app
from router.admission import Admission
from router.answer import ServedModel
from router.api import create_app
from router.cluster_metrics import ClusterCollector
from router.dashboard.state import Dashboard
from router.frontend import Frontend
from router.gate import make_gate
from router.grpc_api import InferenceServicer
from router.grpc_server import new_public_server
from router.http_server import HttpServer
from router.metrics import RouterMetrics
from router.pair_checker import PairChecker
from router.pipeline import RequestPipeline
from router.placement import PlacementGoals, Placer
from router.policy import make_policies
from router.ports import RouterPorts, Security, take_ports
from router.prefix_index import PrefixIndex
from router.registry import Registry, RegistryService
from router.retries import Retries, RetryBudget
from router.supervision import Supervision
from router.tokenizer import load_tokenizer
from router.waiting_line import QueueBounds

logger = logging.getLogger(__name__)

STOP_GRACE_S = 1.0
LAST_WORDS_S = 10.0  # what outlasts a drain is ended by `stop`, with a typed error, and not by its server
HTTP_START_S = 10.0
DEFAULT_TTFT_GOAL_S = 3.0  # where none is configured, nothing is refused for it, but who computes a prompt hangs on it
# By router.disaggregation: when decode workers begin to compute prompts. In a cluster that starts, prefill workers come
# within seconds.
LONE_DECODE_S = {"auto": 5.0, "always": None, "never": 0.0}


class RouterServer:
    """A running router. Make one with `start`."""

    def __init__(
        self,
        section: RouterSection,
        pipeline: RequestPipeline,
        checker: PairChecker,
        http_servers: list[HttpServer],
        grpc_servers: dict[str, grpc.aio.Server],
        ports: RouterPorts,
    ) -> None:
        """http_servers: of the HTTP port, and of the one for metrics where there is one."""
        self._drain_timeout_s = section.drain_timeout_s
        self._drained: asyncio.Task[None] | None = None
        self._drain_begun = asyncio.Event()
        self._pipeline = pipeline
        self._checker = checker
        self._http_servers = http_servers
        self._grpc_servers = grpc_servers
        sockets = [ports.http] if ports.metrics is None else [ports.http, ports.metrics]
        self._http_tasks = [
            asyncio.create_task(server.serve(sockets=[socket]), name="http")
            for server, socket in zip(http_servers, sockets, strict=True)
        ]
        self._background: list[asyncio.Task[None]] = []
        self.http_url = ports.http_url
        self.metrics_url = ports.metrics_url
        self.grpc_address = ports.grpc
        self.control_address = ports.control

    @staticmethod
    async def start(config: ServeConfig) -> RouterServer:
        """Load the tokenizer, take the ports, serve. Raises: ConfigError, ModelError."""
        allow_many_connections()
        security = Security(config.security.certificate(), config.control_access())
        tracer = make_tracer(config.telemetry, "pdserve-router", f"router-{os.getpid()}")
        path = await asyncio.to_thread(resolve_model, config.model.source)
        tokenizer = await asyncio.to_thread(load_tokenizer, path)
        metrics = RouterMetrics()
        index = PrefixIndex(config.router.max_index_blocks, metrics.dropped_index_blocks.inc)
        registry = Registry(
            config.model.served_name,
            index,
            must_check_pairs=config.transfer.self_test,
            lone_decode_s=LONE_DECODE_S[config.router.disaggregation],
        )
        checker = PairChecker(registry, lambda result: metrics.pair_checks.labels(result).inc())
        policies = make_policies(config.router.policy, random.Random())
        bounds = QueueBounds(config.router.max_queued_requests, config.router.max_queued_tokens)
        goals = PlacementGoals(
            config.router.disaggregation, config.slo.ttft_s or DEFAULT_TTFT_GOAL_S, config.slo.tpot_s
        )
        admission = Admission(registry, Placer(registry, policies, goals), bounds, config.slo.ttft_s)
        retries = Retries(RetryBudget(), metrics, config.router.max_attempts, registry.transfer_ended)
        pipeline = RequestPipeline(admission, metrics, retries, tracer)
        model = ServedModel(config.model.served_name, registry)
        gate = make_gate(config, lambda error: metrics.refusals.labels(type(error).__name__).inc())
        frontend = Frontend(pipeline, tokenizer, model, config.router.request_timeout_s, gate)
        supervision = Supervision()
        status = ClusterStatusSource(model, registry, admission, supervision)
        metrics.registry.register(ClusterCollector(status))
        dashboard = Dashboard(status, metrics.registry, pipeline.running)
        metrics.on_ended = dashboard.request_ended

        shares_ports = config.router.processes > 1
        servers = {
            "public": new_public_server(gate, shares_port=shares_ports),
            "control": new_cluster_server(security.access),
        }
        try:
            control = bind_cluster_port(
                servers["control"], config.router.control_host, config.router.control_port, security.access
            )
            ports = None if shares_ports else take_ports(config.router, security, servers["public"], control)
            pb_grpc.add_InferenceServicer_to_server(InferenceServicer(frontend), servers["public"])
            pb_grpc.add_RegistryServicer_to_server(
                RegistryService(registry, status, supervision, security.access), servers["control"]
            )
            await add_standard_services(servers["public"], ["pdserve.v1.Inference"])
            await add_standard_services(servers["control"], ["pdserve.v1.Registry"])
            await servers["control"].start()
            if ports is None:
                await registry.until_ready()  # it is dealt connections as soon as it listens; others serve them so far
                ports = take_ports(config.router, security, servers["public"], control)
            await servers["public"].start()
        except BaseException:
            await asyncio.gather(*(server.stop(None) for server in servers.values()))
            raise
        pages = AdminPages(metrics.registry, status, dashboard)
        http_servers = _http_servers(frontend, pages, security, config.router)
        router = RouterServer(config.router, pipeline, checker, http_servers, servers, ports)
        router.keep_running(dashboard.run())
        async with asyncio.timeout(HTTP_START_S):
            for http in http_servers:
                await http.is_ready.wait()
        logger.info("serving %s on %s, gRPC %s, control %s", model.name, ports.http_url, ports.grpc, ports.control)
        return router

    def keep_running(self, work: Coroutine[Any, Any, None]) -> None:
        """Beside everything else, until `stop`."""
        self._background.append(asyncio.create_task(work))

    def begin_drain(self) -> None:
        """The public ports close, so that whoever shares them gets the new connections; answers that run end first."""
        if self._drained is None:
            self._drained = asyncio.create_task(self._drain(), name="drain")
            self._drain_begun.set()

    async def wait_drained(self) -> None:
        await self._drain_begun.wait()
        assert self._drained is not None
        await asyncio.shield(self._drained)

    async def _drain(self) -> None:
        """The control port stays: without members a request that runs could not be tried again."""
        logger.info("draining: what runs may end within %g s", self._drain_timeout_s)
        self._pipeline.begin_drain()
        grace_s = self._drain_timeout_s + LAST_WORDS_S
        self._http_servers[0].begin_shutdown(grace_s)
        public = asyncio.ensure_future(self._grpc_servers["public"].stop(grace_s))
        await asyncio.wait({self._http_tasks[0], public}, timeout=self._drain_timeout_s)

    async def wait_crashed(self) -> BaseException:
        ended, _ = await asyncio.wait(self._http_tasks, return_when=asyncio.FIRST_COMPLETED)
        if self._drained is not None:
            await asyncio.get_running_loop().create_future()  # it ended as it should: never
        return ended.pop().exception() or RuntimeError("the HTTP server ended by itself")

    async def stop(self) -> None:
        """End every request with a typed error, let the answers out, then close the ports."""
        for task in self._background:
            task.cancel()
        await self._checker.close()
        await self._pipeline.close()
        for http in self._http_servers:
            http.begin_shutdown(STOP_GRACE_S)
        await asyncio.gather(*(server.stop(STOP_GRACE_S) for server in self._grpc_servers.values()))
        await asyncio.wait(self._http_tasks, timeout=STOP_GRACE_S)
        for http in self._http_servers:
            http.force_exit = True  # of a drain, whose grace is longer
        await asyncio.gather(*self._http_tasks, return_exceptions=True)


class ClusterStatusSource:
    """What `pdserve status` shows."""

    def __init__(self, model: ServedModel, registry: Registry, admission: Admission, supervision: Supervision) -> None:
        self._model = model
        self._registry = registry
        self._admission = admission
        self._supervision = supervision
        self._start_s = time.monotonic()

    def __call__(self) -> pb.ClusterStatus:
        reason = self._registry.not_ready_reason()
        workers = sorted(self._registry.workers, key=lambda worker: worker.worker_id)
        return pb.ClusterStatus(
            model=self._model.name,
            is_ready=reason is None,
            reason=reason or "",
            workers=[worker.summary(self._registry.num_cached_blocks(worker)) for worker in workers],
            pairs=[pair.summary() for pair in sorted(self._registry.pairs, key=str)],
            num_queued=self._admission.num_queued,
            num_active=self._admission.num_placed,
            uptime_s=time.monotonic() - self._start_s,
            pools=self._supervision.pools,
            clock_s=time.time(),
        )


def _http_servers(
    frontend: Frontend, pages: AdminPages, security: Security, section: RouterSection
) -> list[HttpServer]:
    tls = None if security.certificate is None else security.certificate.http_context()
    if not section.has_metrics_port:
        return [HttpServer(create_app(frontend, pages), tls)]
    if tls is None and not section.is_private:
        logger.warning("%s can be reached from other machines, without TLS: set security.tls", section.host)
    return [HttpServer(create_app(frontend), tls), HttpServer(create_admin_app(pages))]
