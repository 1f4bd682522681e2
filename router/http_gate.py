"""Every HTTP path but the open ones needs a key, which is looked at before a byte of the body is read.

Plain ASGI, as router/http_middleware.py.
"""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import ServingError
from router.admin_pages import PATHS as ADMIN_PATHS
from router.gate import Gate
from router.http_errors import error_response
from router.tenant import Tenant

# For probes, scrapers and people; none of them tells anything of a tenant.
OPEN_PATHS = frozenset({"/health", "/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json", *ADMIN_PATHS})


class GateMiddleware:
    """Sets `request.state.tenant`, and tells each answer's client what is left of its limits."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        try:
            tenant = self._gate.tenant(Headers(scope=scope).get("Authorization"))
        except ServingError as error:
            await error_response(error)(scope, receive, send)
            return
        scope.setdefault("state", {})["tenant"] = tenant
        send_with_limits = self._with_limits(tenant, send)
        try:
            if scope["method"] == "POST":
                self._gate.require_room(tenant)
        except ServingError as error:
            await error_response(error)(scope, receive, send_with_limits)
        else:
            await self._app(scope, receive, send_with_limits)

    def _with_limits(self, tenant: Tenant, send: Send) -> Send:
        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(self._gate.limit_headers(tenant))
            await send(message)

        return send_with_limits
