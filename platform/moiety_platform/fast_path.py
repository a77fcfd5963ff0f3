"""The application's way of a request before the framework: what holds for every route, and a bypass for engines.

HEAD, content codings and cross-origin requests are handled here. Handlers of POST requests to engines are ASGI
applications: the framework's routing, request and response objects would cost more than the check of the key. All other
requests to their paths take the framework's route.
"""

from __future__ import annotations

from typing import Any

from litestar import Litestar
from litestar.routes import HTTPRoute
from litestar.types import ASGIApp

from moiety_platform.body_decoding import DecodedBody
from moiety_platform.cors import CrossOriginPolicy, answer_preflight, is_preflight, with_origin_headers
from moiety_platform.head_requests import answer_head
from moiety_platform.request_head import coding_of

DIRECT = "direct"  # key of this ASGI application in the `opt` of its POST route
OWN_BODY_LIMIT = "own_body_limit"  # key in the `opt` of a POST route that limits its body itself


class GatewayApp(Litestar):
    """Application with direct dispatch of POST requests.

    Routes with an ASGI application of their own get POST requests directly, and add the request id to their responses.
    `cross_origin` may be replaced, for later requests; None allows no page of another origin.
    """

    __slots__ = ("_direct", "_self_limited", "cross_origin")

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.cross_origin: CrossOriginPolicy | None = None
        handlers = [
            (route.path, handler)
            for route in self.routes
            if isinstance(route, HTTPRoute)
            for handler in route.route_handlers
        ]
        self._direct: dict[str, ASGIApp] = {path: one.opt[DIRECT] for path, one in handlers if DIRECT in one.opt}
        self._self_limited = frozenset(path for path, one in handlers if OWN_BODY_LIMIT in one.opt)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        scope.setdefault("state", {})  # not every server sets it
        if self.cross_origin is not None:
            headers = self.cross_origin.origin_headers(scope)
            if headers and is_preflight(scope):
                await answer_preflight(headers, scope, send)
                return
            if headers:
                send = with_origin_headers(headers, scope, send)
        coding = coding_of(scope)
        if coding is not None:
            limit = None if scope["path"] in self._self_limited else self.state.max_body_bytes
            receive = DecodedBody(receive, coding, limit)
        if scope["method"] == "HEAD":
            await answer_head(super().__call__, scope, receive, send)
            return
        direct = self._direct.get(scope["path"]) if scope["method"] == "POST" else None
        await (direct or super().__call__)(scope, receive, send)
