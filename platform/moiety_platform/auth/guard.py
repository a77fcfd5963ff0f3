"""The door of guarded routes: a Litestar guard that lets keys with the right scope through."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler

from moiety_platform.auth.authenticator import Authenticator
from moiety_platform.auth.scopes import ADMIN_SCOPE, INFERENCE_SCOPE, require_scope

__all__ = ["ADMIN_SCOPE", "INFERENCE_SCOPE", "AsyncGuard", "require_scope", "scope_guard"]

AsyncGuard = Callable[[ASGIConnection[Any, Any, Any, Any], BaseRouteHandler], Awaitable[None]]


def scope_guard(authenticator: Authenticator, scope: str = ADMIN_SCOPE) -> AsyncGuard:
    """A guard for routes that need `scope`; leaves the caller in `connection.state.principal`. Raises
    Unauthenticated, Forbidden or Unavailable."""

    async def guard(connection: ASGIConnection[Any, Any, Any, Any], _handler: BaseRouteHandler) -> None:
        principal = await authenticator.authenticate(connection.headers.get("authorization"))
        require_scope(principal, scope)
        connection.state.principal = principal

    return guard
