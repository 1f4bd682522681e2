"""GET /dashboard, what it is fed by, and the last requests as a file."""

from __future__ import annotations

import orjson
from fastapi import FastAPI, Query
from starlette.responses import Response

from router.dashboard.page import dashboard_page
from router.dashboard.state import Dashboard, JsonObject

PATHS = ("/dashboard", "/dashboard/state", "/dashboard/trace")


def add_dashboard(app: FastAPI, dashboard: Dashboard) -> None:
    """For people: the paths are in no API document."""

    @app.get("/dashboard", include_in_schema=False)
    async def page() -> Response:
        page = dashboard_page()
        return Response(page.html, headers=page.headers, media_type="text/html; charset=utf-8")

    @app.get("/dashboard/state", include_in_schema=False)
    async def state(after: int = Query(default=0, ge=0)) -> Response:
        return _json(dashboard.state(after))

    @app.get("/dashboard/trace", include_in_schema=False)
    async def trace() -> Response:
        return _json(dashboard.trace(), {"Content-Disposition": 'attachment; filename="pdserve-trace.json"'})


def _json(content: JsonObject, headers: dict[str, str] | None = None) -> Response:
    fixed = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
    return Response(orjson.dumps(content), headers=fixed | (headers or {}), media_type="application/json")
