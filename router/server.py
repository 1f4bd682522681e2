"""Composes the router: registry and status on the control port, the OpenAI API over HTTP, Inference over gRPC."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import time
from dataclasses import dataclass

import grpc

from common.config import RouterSection, ServeConfig
from common.errors import ConfigError
from common.model_source import resolve_model
from common.pb import serving_pb2 as pb
from common.pb import serving_pb2_grpc as pb_grpc
from common.rpc import bind_port, new_server
from common.standard_services import add_standard_services
from router.admission import Admission
from router.answer import ServedModel
from router.api import create_app
from router.frontend import Frontend
from router.gate import make_gate
from router.grpc_api import InferenceServicer
from router.grpc_server import new_public_server
from router.http_server import HttpServer
from router.metrics import RouterMetrics
from router.pair_checker import PairChecker
from router.pipeline import RequestPipeline
from router.policy import make_policies
from router.prefix_index import PrefixIndex
from router.registry import Registry, RegistryService
from router.retries import Retries, RetryBudget
from router.tokenizer import load_tokenizer
from router.waiting_line import QueueBounds

logger = logging.getLogger(__name__)

STOP_GRACE_S = 1.0
LAST_WORDS_S = 10.0  # what outlasts a drain is ended by `stop`, with a typed error, and not by its server
HTTP_START_S = 10.0
SHARED_START_S = 5.0  # then it listens without workers too, and says why it does not serve
SHARED_POLL_S = 0.02


class RouterServer:
    """A running router. Make one with `start`."""

    def __init__(
        self,
        section: RouterSection,
        pipeline: RequestPipeline,
        checker: PairChecker,
        http: HttpServer,
        grpc_servers: dict[str, grpc.aio.Server],
        addresses: RouterAddresses,
    ) -> None:
        self._drain_timeout_s = section.drain_timeout_s
        self._drained: asyncio.Task[None] | None = None
        self._drain_begun = asyncio.Event()
        self._pipeline = pipeline
        self._checker = checker
        self._http = http
        self._grpc_servers = grpc_servers
        self._http_task = asyncio.create_task(http.serve(sockets=[addresses.http_socket]), name="http")
        self.http_is_ready = http.is_ready
        self.http_url = addresses.http_url
        self.grpc_address = addresses.grpc
        self.control_address = addresses.control

    @staticmethod
    async def start(config: ServeConfig) -> RouterServer:
        """Load the tokenizer, take the three ports, serve. Raises: ConfigError, ModelError."""
        path = await asyncio.to_thread(resolve_model, config.model.source)
        tokenizer = await asyncio.to_thread(load_tokenizer, path)
        metrics = RouterMetrics()
        index = PrefixIndex(config.router.max_index_blocks, metrics.dropped_index_blocks.inc)
        registry = Registry(config.model.served_name, index, must_check_pairs=config.transfer.self_test)
        checker = PairChecker(registry, lambda result: metrics.pair_checks.labels(result).inc())
        policies = make_policies(config.router.policy, random.Random())
        bounds = QueueBounds(config.router.max_queued_requests, config.router.max_queued_tokens)
        admission = Admission(registry, policies, bounds)
        retries = Retries(RetryBudget(), metrics, config.router.max_attempts, registry.transfer_ended)
        pipeline = RequestPipeline(admission, metrics, retries)
        model = ServedModel(config.model.served_name, registry)
        gate = make_gate(config, lambda error: metrics.refusals.labels(type(error).__name__).inc())
        frontend = Frontend(pipeline, tokenizer, model, config.router.request_timeout_s, gate)
        status = ClusterStatusSource(model, registry, admission)

        shares_ports = config.router.processes > 1
        servers = {"public": new_public_server(gate, shares_port=shares_ports), "control": new_server()}
        try:
            control = bind_port(servers["control"], config.router.host, config.router.control_port)
            addresses = None if shares_ports else _bind_public(config.router, servers["public"], control)
            pb_grpc.add_InferenceServicer_to_server(InferenceServicer(frontend), servers["public"])
            pb_grpc.add_RegistryServicer_to_server(RegistryService(registry, status), servers["control"])
            await add_standard_services(servers["public"], ["pdserve.v1.Inference"])
            await add_standard_services(servers["control"], ["pdserve.v1.Registry"])
            await servers["control"].start()
            if addresses is None:
                await _until_ready(registry)
                addresses = _bind_public(config.router, servers["public"], control)
            await servers["public"].start()
        except BaseException:
            await asyncio.gather(*(server.stop(None) for server in servers.values()))
            raise
        router = RouterServer(
            config.router, pipeline, checker, HttpServer(create_app(frontend, metrics.registry)), servers, addresses
        )
        await asyncio.wait_for(router.http_is_ready.wait(), HTTP_START_S)
        logger.info(
            "serving %s on %s, gRPC %s, control %s", model.name, router.http_url, addresses.grpc, addresses.control
        )
        return router

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
        self._http.begin_shutdown(grace_s)
        public = asyncio.ensure_future(self._grpc_servers["public"].stop(grace_s))
        await asyncio.wait({self._http_task, public}, timeout=self._drain_timeout_s)

    async def wait_crashed(self) -> BaseException:
        await asyncio.wait({self._http_task})
        if self._drained is not None:
            await asyncio.get_running_loop().create_future()  # it ended as it should: never
        return self._http_task.exception() or RuntimeError("the HTTP server ended by itself")

    async def stop(self) -> None:
        """End every request with a typed error, let the answers out, then close the ports."""
        await self._checker.close()
        await self._pipeline.close()
        self._http.begin_shutdown(STOP_GRACE_S)
        await asyncio.gather(*(server.stop(STOP_GRACE_S) for server in self._grpc_servers.values()))
        await asyncio.wait({self._http_task}, timeout=STOP_GRACE_S)
        self._http.force_exit = True  # of a drain, whose grace is longer
        await asyncio.gather(self._http_task, return_exceptions=True)


@dataclass(frozen=True)
class RouterAddresses:
    http_socket: socket.socket
    http_url: str
    grpc: str
    control: str


class ClusterStatusSource:
    """What `pdserve status` shows."""

    def __init__(self, model: ServedModel, registry: Registry, admission: Admission) -> None:
        self._model = model
        self._registry = registry
        self._admission = admission
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
        )


async def _until_ready(registry: Registry) -> None:
    """One of several routers is dealt connections as soon as it listens: others serve them until it has workers."""
    give_up_s = time.monotonic() + SHARED_START_S
    while registry.not_ready_reason() is not None and time.monotonic() < give_up_s:  # noqa: ASYNC110, once per process
        await asyncio.sleep(SHARED_POLL_S)


def _bind_public(section: RouterSection, public: grpc.aio.Server, control: str) -> RouterAddresses:
    """Take both ports before serving on any. Raises: ConfigError naming the port that is taken."""
    family = socket.AF_INET6 if ":" in section.host else socket.AF_INET
    http_socket = socket.socket(family, socket.SOCK_STREAM)
    http_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if section.processes > 1:
        http_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        http_socket.bind((section.host, section.http_port))
    except OSError as error:
        http_socket.close()
        raise ConfigError(
            f"cannot listen on {section.host}:{section.http_port}: {error.strerror}; choose another router.http_port"
        ) from error
    host, port = http_socket.getsockname()[:2]
    return RouterAddresses(
        http_socket,
        f"http://{host}:{port}",
        bind_port(public, section.host, section.grpc_port),
        control,
    )
