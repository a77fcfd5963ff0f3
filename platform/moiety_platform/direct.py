"""Bypass of the framework for POST requests to engines.

Each of their handlers is an ASGI application: the framework's routing, request and response objects would cost more
than the check of the key. All other requests to their paths take the framework's route.
"""

from __future__ import annotations

from typing import Any

from litestar import Litestar
from litestar.routes import HTTPRoute
from litestar.types import ASGIApp

DIRECT = "direct"  # key of this ASGI application in the `opt` of its POST route


class GatewayApp(Litestar):
    """Application with direct dispatch of POST requests.

    Routes with an ASGI application of their own get POST requests directly, and add the request id to their responses.
    """

    __slots__ = ("_direct",)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._direct: dict[str, ASGIApp] = {
            route.path: handler.opt[DIRECT]
            for route in self.routes
            if isinstance(route, HTTPRoute)
            for handler in route.route_handlers
            if DIRECT in handler.opt
        }

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        direct = self._direct.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if direct is None:
            await super().__call__(scope, receive, send)
        else:
            scope.setdefault("state", {})  # not every server sets it
            await direct(scope, receive, send)
