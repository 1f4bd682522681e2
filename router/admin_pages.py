"""What is for whoever runs the cluster: /metrics, where Prometheus finds the workers' own, and /dashboard.

On the HTTP port while that is loopback and the only one there is, else on router.metrics_port. No key is asked for:
nothing here tells of a tenant, a prompt or an answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.responses import JSONResponse, PlainTextResponse, Response

from common.pb import serving_pb2 as pb
from router.dashboard.routes import PATHS as DASHBOARD_PATHS
from router.dashboard.routes import add_dashboard
from router.dashboard.state import Dashboard
from router.http_errors import add_error_handlers
from router.openapi import exposing
from router.worker import ROLES

PATHS = ("/metrics", "/metrics/targets", *DASHBOARD_PATHS)


@dataclass(frozen=True)
class AdminPages:
    registry: CollectorRegistry
    status: Callable[[], pb.ClusterStatus]
    dashboard: Dashboard

    def add_to(self, app: FastAPI) -> None:
        @app.get("/metrics", response_class=PlainTextResponse, responses=exposing(CONTENT_TYPE_LATEST))
        async def read_metrics() -> Response:
            return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)

        @app.get("/metrics/targets", include_in_schema=False)
        async def find_workers() -> JSONResponse:
            """For Prometheus' http_sd_configs: where the workers' metrics are."""
            hellos = [worker.hello for worker in self.status().workers]
            return JSONResponse([_target(hello) for hello in hellos if hello.metrics_address])

        add_dashboard(app, self.dashboard)


def create_admin_app(pages: AdminPages) -> FastAPI:
    """Nothing but these."""
    app = FastAPI(title="pdserve admin", openapi_url=None)
    add_error_handlers(app)
    pages.add_to(app)
    return app


def _target(hello: pb.WorkerHello) -> dict[str, object]:
    return {
        "targets": [hello.metrics_address],
        "labels": {"worker": hello.worker_id, "role": ROLES[hello.role]},
    }
